"""Fields that cannot be honoured are refused, in OpenAI's shape and with the name of the field. Nothing is ignored."""

import gzip
import json
import re

import pytest
from openai import BadRequestError, NotFoundError

from specbeam import prompts
from specbeam.server.limits import Limits

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"prompt": "Hi"}


@pytest.mark.parametrize(
    "fields",  # the first one is wrong
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"min_p": 1.5},
        {"n": 0},
        {"n": True},
        {"n": 4, "num_beams": 2},
        {"seed": 1.5},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
        {"logit_bias": {"99999": 1}},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"1": 1e9}},
        {"logit_bias": {"1": -10001}},
        {"logit_bias": {"1_0": 1}},
        {"logit_bias": {"+1": 1}},
        {"stop": ""},
        {"stop": 5},
        {"max_tokens": -1},
        {"min_tokens": 9, "max_tokens": 3},
        {"top_p": 0.9, "temperature": 0, "num_beams": 2},
        {"stop_token_ids": [999]},
        {"frequency_penalty": 3},
        {"repetition_penalty": 0},
        {"length_penalty": 1},
        {"early_stopping": "sometimes", "num_beams": 2},
        {"use_beam_search": True, "num_beams": 2},
        {"draft": "unknown"},
        {"num_draft_tokens": 3},
        {"draft_temperature": 3, "draft": "ngram"},
        {"store": True},
        {"guided_json": {}},
        {"temprature": 1},
    ],
)
def test_fields_of_every_endpoint(served, fields):
    param = next(iter(fields))
    for path, prompt in ONE_PROMPT.items():
        named = {"max_tokens": "max_output_tokens"} if path == "responses" else {}
        wrong = {named.get(name, name): value for name, value in fields.items()}
        error = served.refused(f"/v1/{path}", **prompt, **wrong)
        assert error["param"] == named.get(param, param)
        assert error["param"] in error["message"]
        assert error["type"] == "invalid_request_error"


FUNCTION = [{"type": "function"}]
UNKNOWN = {"stream_options": {"unknown": True}, "stream": True}
ONE_PROMPT = {"completions": PROMPT, "chat/completions": CHAT, "responses": {"input": "Hi"}}


@pytest.mark.parametrize(
    ("paths", "fields", "message"),  # the first field is wrong
    [
        ("completions chat/completions", {"best_of": 2, "n": 3}, ""),
        ("completions chat/completions", {"best_of": 3, "n": 2, "stream": True}, ""),
        ("completions chat/completions", {"stream_options": {"include_usage": True}}, ""),
        ("completions chat/completions responses", UNKNOWN, ""),
        ("chat/completions", {"modalities": FUNCTION}, ""),
        ("chat/completions", {"reasoning_effort": FUNCTION}, ""),
        ("chat/completions", {"response_format": {"type": "json_object"}}, ""),
        ("responses", {"previous_response_id": "auto"}, ""),
        ("responses", {"conversation": "auto"}, ""),
        ("responses", {"reasoning": "auto"}, ""),
        ("responses", {"truncation": "auto"}, ""),
        ("responses", {"background": True}, ""),
        ("responses", {"return_token_ids": True}, ""),
        ("responses", {"tools": FUNCTION}, ""),
        ("responses", {"n": 2}, ""),
        ("chat/completions", {"tools": FUNCTION}, "tools is not supported: remove it"),
        ("chat/completions", {"functions": FUNCTION}, "functions is not supported: remove it"),
        ("chat/completions", {"audio": FUNCTION}, "audio is not supported: remove it"),
        ("chat/completions", {"prediction": FUNCTION}, "prediction is not supported: remove it"),
        ("chat/completions", {"web_search_options": FUNCTION}, "web_search_options is not supported: remove it"),
        # Not to prediction, which is refused, too.
        ("chat/completions", {"predictions": 5}, "predictions is not supported: remove it"),
        ("completions", {"temprature": 1}, "temprature is not supported: did you mean temperature?"),
        ("responses", {"max_tokens": 1}, "max_tokens is not supported: did you mean max_output_tokens?"),
        ("completions chat/completions", {"n_predict": 5}, "n_predict is not supported: did you mean max_tokens?"),
        ("completions", {"stop": ["a", ""]}, "stop='' is not allowed: give text that is not empty"),
        ("completions", {"seed": 2**64}, "seed: Input should be less than 18446744073709551616"),
        ("completions", {"logit_bias": {"5": 10001}}, "logit_bias: Input should be less than or equal to 10000"),
        ("completions", {"logit_bias": {"5": -10001}}, "logit_bias: Input should be greater than or equal to -10000"),
        ("completions", {"guided_choice": ["a"]}, "guided_choice is not supported: did you mean structured_outputs?"),
    ],
)
def test_fields_of_some_endpoints(served, paths, fields, message):
    """The message, where it is given, names the value and what to do."""
    for path in paths.split():
        error = served.refused(f"/v1/{path}", **ONE_PROMPT[path], **fields)
        assert error["param"] == next(iter(fields))
        assert error["message"] == message or not message


IMAGE = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content: Field required"),
        ([{"content": "Hi"}], "messages[0].role: Field required"),
        ([{"role": "user", "content": IMAGE}], "messages[0].content[0].type: Input should be 'text'"),
        ([{"role": "robot", "content": "Hi"}], ""),
        ([{"role": "user", "content": None}], "messages[0].content: Field required"),
        ([{"role": "user", "content": "Hi", "name": "<|im_end|>"}], ""),
        ([{"role": "user", "content": "Hi", "refusal": "No"}], "refusal is not supported: remove it"),
        ([{"role": "user", "content": "\ud800"}], ""),
        ("Hi", "messages"),
    ],
)
def test_messages(served, messages, says):
    body = json.dumps({"messages": messages})  # with half a surrogate pair escaped
    response = served.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert error["message"].startswith(says)
    assert (error["code"] == "missing_parameter") == ("Field required" in says)


def test_a_field_of_an_input_is_named(served):
    error = served.refused("/v1/responses", input=[{"role": "user"}])
    assert error["message"] == "input[0].content: Field required"


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [1, -1], [1, "a"], [300], [[300]], None, {"a": 1}, 5])
def test_prompts(served, prompt):
    assert served.refused("/v1/completions", prompt=prompt)["param"] == "prompt"


CUT_OFF = "the body is cut off: its JSON ends too early, at line "


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "the body is empty: send a JSON object"),
        (" \n", "the body is empty: send a JSON object"),
        ("{", f"{CUT_OFF}1, column 2"),
        ('{"prompt": "a', f"{CUT_OFF}1, column 14"),
        ('{"prompt": "a",\n "max_tokens": 1', f"{CUT_OFF}2, column 17"),
        ('{"prompt": "a", "stream": tru', f"{CUT_OFF}1, column 30"),
        ('{"prompt": "a"} x', "the body is not valid JSON: Extra data at line 1, column 17"),
        ('{"prompt": "a",\n}', "the body is not valid JSON: "),
        ('{"prompt":\n a}', "the body is not valid JSON: Expecting value at line 2, column 2"),
        ('\ufeff{"prompt": "a"}', "the body begins with a byte order mark: send UTF-8 without one"),
        ("[]", "the body must be a JSON object"),
        ("null", "the body must be a JSON object"),
        ('"a"', "the body must be a JSON object"),
        ('{"prompt": NaN}', ""),
        ("[" * 100_000, ""),
        ('{"prompt": 1' + "0" * 9999 + "}", ""),
        (b'{"prompt": "\xff"}', "the body cannot be read: send JSON in UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "the body cannot be read: send JSON in UTF-8"),
        ('{"prompt": "a", "max_tokens": 1, "max_tokens": 2}', "max_tokens is given twice"),
        ('{"stream_options": {"include_usage": true, "include_usage": 0}}', "include_usage is given twice"),
    ],
)
def test_bodies_are_told_what_is_wrong_with_them(served, body, says):
    content = body if isinstance(body, bytes) else body.encode()
    response = served.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].startswith(says)
    if says.endswith("twice"):
        assert error["param"] == says.split()[0]


def test_an_encoded_body_is_refused_as_such(served):
    body = gzip.compress(json.dumps(PROMPT).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = served.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_content_encoding"
    assert "Content-Encoding 'gzip'" in response.json()["error"]["message"]
    body, headers["content-encoding"] = json.dumps(PROMPT | {"max_tokens": 1}), "identity"
    assert served.http.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_a_body_without_its_type(served):
    response = served.http.post("/v1/completions", content=json.dumps(PROMPT), headers={"content-type": "text/plain"})
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


def test_clients_raise_their_own_errors(served):
    client = served.client()
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="Hi", top_p=0.0)
    assert caught.value.param == "top_p"
    with pytest.raises(NotFoundError, match="no model 'other'") as missing:
        client.completions.create(model="other", prompt="Hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(NotFoundError):
        client.models.retrieve("other")


def test_a_model_without_a_chat_template(served):
    assert served.refused("/v1/chat/completions", model="plain", **CHAT)["code"] == "no_chat_template"
    assert served.refused("/v1/responses", model="plain", input="Hi")["code"] == "no_chat_template"
    assert served.post("/v1/completions", model="plain", prompt="Hi").status_code == 200


def test_a_prompt_that_is_longer_than_the_context(served):
    error = served.refused("/v1/completions", prompt="a" * 300)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "256" in error["message"]
    error = served.refused("/v1/completions", prompt="a" * 256, max_tokens=0, echo=True)
    assert error["code"] == "context_length_exceeded"


LONG_CHAT = {"messages": [{"role": "user", "content": "a" * 231}]}


@pytest.mark.parametrize(
    ("path", "limit", "prompt"),
    [
        ("/v1/completions", "max_tokens", {"prompt": "a" * 250}),
        ("/v1/completions", "max_tokens", {"prompt": "a" * 250, "echo": True, "n": 2, "stream": True}),
        ("/v1/completions", "max_tokens", {"prompt": "a" * 250, "num_beams": 3}),
        ("/rounds/completions", "max_tokens", {"prompt": "a" * 250}),
        ("/v1/chat/completions", "max_tokens", LONG_CHAT),
        ("/v1/chat/completions", "max_completion_tokens", LONG_CHAT),
        ("/v1/responses", "max_output_tokens", {"input": "a" * 231}),
    ],
)
def test_a_prompt_and_new_tokens_that_the_context_cannot_hold_together(served, path, limit, prompt):
    """The prompt has 250 tokens, and the context holds 256."""
    error = served.refused(path, **prompt, **{limit: 50})
    assert (error["param"], error["code"]) == (limit, "context_length_exceeded")
    assert error["message"] == (
        f"the prompt has 250 tokens and {limit} is 50, but the model's context holds 256: "
        "ask for at most 6 new tokens, or shorten the prompt"
    )
    assert served.refused(path, **prompt, **{limit: 7})["code"] == "context_length_exceeded"
    assert served.post(path, **prompt, **{limit: 6}).status_code == 200
    if len(prompt) == 1 and path.startswith("/v1"):  # without a limit, the text may fill the context
        usage = served.post(path, **prompt, temperature=0, ignore_eos=True).json()["usage"]
        assert usage["total_tokens"] == 256


def test_a_far_longer_prompt_is_not_tokenized(served, start, chat_lm, monkeypatch):
    monkeypatch.setattr(prompts, "tokenize", None)
    text = "a" * 20_000
    fields = {"prompt": text, "messages": [{"role": "user", "content": text}], "input": text}
    begins = r"the prompt has at least 2,5\d\d tokens, "
    with start({"tiny": chat_lm}, limits=Limits(max_prompt_tokens=20)) as small:
        for path, (param, value) in zip(ONE_PROMPT, fields.items(), strict=True):
            error = served.refused(f"/v1/{path}", **{param: value})
            assert re.fullmatch(f"{begins}but the model's context holds 256: shorten it", error["message"])
            assert (error["param"], error["code"]) == (param, "context_length_exceeded")
            error = small.refused(f"/v1/{path}", **{param: value})
            assert re.fullmatch(f"{begins}and this server's limit is 20", error["message"])


def test_no_message_shows_where_files_are(served, chat_lm):
    folder = str(chat_lm.source)
    for fields in ({"prompt": "a" * 256}, {"prompt": [999]}, {"model": "x"}, {"prompt": "a", "stop_token_ids": [999]}):
        assert folder not in served.post("/v1/completions", **{"prompt": "a", **fields}).text
    assert folder not in served.http.get("/v1/models").text


def test_limits(start, chat_lm):
    sizes = {"max_body_bytes": 2000, "max_prompts": 2, "max_prompt_tokens": 20, "max_cache_tokens": 49}
    limits = Limits(**sizes, max_tokens=30, max_beams=4)
    with start({"tiny": chat_lm}, limits=limits) as server:
        for fields, param in [
            ({"prompt": ["a"] * 3}, "prompt"),
            ({"prompt": "a" * 21, "max_tokens": 1}, "prompt"),
            ({"max_tokens": 31}, "max_tokens"),
            ({"num_beams": 5}, "num_beams"),
            ({"n": 5}, "n"),
            ({"best_of": 5}, "best_of"),
        ]:
            assert server.refused("/v1/completions", **{"prompt": "a", **fields})["param"] == param
        assert server.refused("/v1/completions", prompt="a" * 21)["code"] == "context_length_exceeded"
        error = server.refused("/v1/completions", prompt="a" * 20, max_tokens=30)
        assert error["param"] == "max_tokens"
        assert re.search("49.* the server's --max-cache-tokens", error["message"])
        assert server.post("/v1/completions", prompt="a" * 20, max_tokens=29).status_code == 200
        assert server.refused("/v1/completions", 413, prompt="a" * 3000)["code"] == "body_too_large"
        chunks = (b" " * 1000 for _ in range(100))  # no Content-Length
        assert server.http.post("/v1/completions", content=chunks).status_code == 413
        answer = server.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": ""}], temperature=0, ignore_eos=True
        )
        assert answer.json()["usage"]["completion_tokens"] == 30  # the limit is the default
        assert server.post("/v1/completions", prompt=["a"] * 2, n=4, max_tokens=1).status_code == 200


def test_unknown_paths_and_methods(served):
    for path, status, says in [("/v1/none", 404, "begins with /v1"), ("/v1/completions", 405, "use POST")]:
        response = served.http.get(path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert says in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/tiny", "/openapi.json", "/"])
def test_head_is_get_without_a_body(served, path):
    whole, head = served.http.get(path), served.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_messages_name_what_a_client_can_give(served):
    """Not the library's options: HTTP has no do_sample, no logits_processor."""
    assert "do_sample" not in served.refused("/v1/completions", **PROMPT, n=4, num_beams=2)["message"]
    choice = {"structured_outputs": {"choice": ["a"]}, "min_tokens": 5, "max_tokens": 9}
    for beams in ({}, {"num_beams": 2}):
        error = served.refused("/v1/completions", **PROMPT, **choice, **beams)
        assert error["param"] == "structured_outputs"
        assert "no text is possible under structured_outputs, min_tokens, max_tokens together" in error["message"]


def test_tokens_of_texts(served, chat_lm):
    given = served.post("/tokenize", prompt="a é", return_token_strs=True).json()
    assert given["tokens"] == chat_lm.tokenizer("a é").input_ids
    assert given["token_strs"] == ["a", "Ġ", "Ã", "©"]  # as the vocabulary writes them
    assert given["count"] == len(given["token_strs"]) == len(given["tokens"])
    assert given["max_model_len"] == 256
    assert served.post("/detokenize", tokens=given["tokens"]).json() == {"prompt": "a é"}
    chat = served.post("/tokenize", **CHAT).json()["tokens"]
    assert chat == chat_lm.tokenizer.apply_chat_template(CHAT["messages"], add_generation_prompt=True)["input_ids"]
    assert served.post("/tokenize", **CHAT, add_special_tokens=False).json()["tokens"] == chat
    assert served.refused("/tokenize", **CHAT, add_special_tokens=True)["param"] == "add_special_tokens"
    assert served.refused("/tokenize", prompt="a", add_generation_prompt=True)["param"] == "add_generation_prompt"
    assert served.refused("/tokenize")["param"] == "prompt"
    assert served.refused("/detokenize", tokens=[300])["param"] == "tokens"


def test_the_list_of_models(served):
    models = served.client().models.list().data
    assert [model.id for model in models] == ["tiny", "plain"]
    assert served.client().models.retrieve("plain") == models[1]
