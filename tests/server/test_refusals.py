"""Fields that cannot be honoured are refused, in OpenAI's shape and with the name of the field. Nothing is ignored."""

import gzip
import json
import re
from dataclasses import replace

import pytest
from openai import BadRequestError, NotFoundError

from specbeam import prompts
from specbeam.server.limits import Limits
from tests.conftest import byte_tokenizer

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
    for path, prompt in (
        ("/v1/completions", PROMPT),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "Hi"}),
    ):
        named = {"max_tokens": "max_output_tokens"} if path == "/v1/responses" else {}
        error = served.refused(path, **prompt, **{named.get(name, name): value for name, value in fields.items()})
        assert error["param"] == named.get(param, param)
        assert error["param"] in error["message"]
        assert error["type"] == "invalid_request_error"


FUNCTION = [{"type": "function"}]
UNKNOWN = {"stream_options": {"unknown": True}, "stream": True}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *(
            (path, fields)
            for path in ("completions", "chat/completions")
            for fields in (
                {"best_of": 2, "n": 3},
                {"best_of": 3, "n": 2, "stream": True},
                {"stream_options": {"include_usage": True}},
                UNKNOWN,
            )
        ),
        *(("chat/completions", {name: FUNCTION}) for name in ("modalities", "reasoning_effort")),
        ("chat/completions", {"response_format": {"type": "json_object"}}),
        *(
            ("responses", {name: "auto"})
            for name in ("previous_response_id", "conversation", "reasoning", "truncation")
        ),
        *(("responses", fields) for fields in ({"background": True}, {"tools": FUNCTION}, {"n": 2}, UNKNOWN)),
    ],
)
def test_fields_of_some_endpoints(served, path, fields):
    prompt = {"completions": PROMPT, "chat/completions": CHAT, "responses": {"input": "Hi"}}[path]
    assert served.refused(f"/v1/{path}", **prompt, **fields)["param"] == next(iter(fields))


@pytest.mark.parametrize("field", ["tools", "functions", "audio", "prediction", "web_search_options"])
def test_fields_for_other_models(served, field):
    error = served.refused("/v1/chat/completions", **CHAT, **{field: FUNCTION})
    assert (error["param"], error["message"]) == (field, f"{field} is not supported: remove it")


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


@pytest.mark.parametrize(
    ("body", "says", "param"),
    [
        ("", "the body is empty: send a JSON object", None),
        (" \n", "the body is empty: send a JSON object", None),
        ("{", "the body is cut off: its JSON ends too early, at line 1, column 2", None),
        ('{"prompt": "a', "the body is cut off: its JSON ends too early, at line 1, column 14", None),
        (
            '{"prompt": "a",\n "max_tokens": 1',
            "the body is cut off: its JSON ends too early, at line 2, column 17",
            None,
        ),
        ('{"prompt": "a", "stream": tru', "the body is cut off: its JSON ends too early, at line 1, column 30", None),
        ('{"prompt": "a"} x', "the body is not valid JSON: Extra data at line 1, column 17", None),
        ('{"prompt": "a",\n}', "the body is not valid JSON: ", None),
        ('{"prompt":\n a}', "the body is not valid JSON: Expecting value at line 2, column 2", None),
        ('\ufeff{"prompt": "a"}', "the body begins with a byte order mark: send UTF-8 without one", None),
        ("[]", "the body must be a JSON object", None),
        ("null", "the body must be a JSON object", None),
        ('"a"', "the body must be a JSON object", None),
        ('{"prompt": NaN}', "", None),
        ("[" * 100_000, "", None),
        ('{"prompt": 1' + "0" * 9999 + "}", "", None),
        (b'{"prompt": "\xff"}', "UTF-8", None),
        ('{"prompt": "a"}'.encode("utf-16"), "UTF-8", None),
        ('{"prompt": "a", "max_tokens": 1, "max_tokens": 2}', "twice", "max_tokens"),
        ('{"prompt": "a", "stream_options": {"include_usage": true, "include_usage": 0}}', "twice", "include_usage"),
    ],
)
def test_bodies_are_told_what_is_wrong_with_them(served, body, says, param):
    content = body if isinstance(body, bytes) else body.encode()
    response = served.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].startswith(says) or (says in ("UTF-8", "twice") and says in error["message"])
    assert param in (None, error["param"])


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


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("completions", {"temprature": 1}, "temprature is not supported: did you mean temperature?"),
        ("responses", {"max_tokens": 1}, "max_tokens is not supported: did you mean max_output_tokens?"),
        ("completions", {"n_predict": 5}, "n_predict is not supported: did you mean max_tokens?"),
        ("chat/completions", {"n_predict": 5}, "n_predict is not supported: did you mean max_tokens?"),
        # Like prediction, which is refused, too.
        ("chat/completions", {"predictions": 5}, "predictions is not supported: remove it"),
        ("completions", {"stop": ""}, "stop='' is not allowed: give text that is not empty"),
        ("completions", {"stop": ["a", ""]}, "stop='' is not allowed: give text that is not empty"),
        ("completions", {"seed": 2**64}, "seed: Input should be less than 18446744073709551616"),
    ],
)
def test_messages_name_the_value_and_what_to_do(served, path, fields, message):
    prompt = {"completions": PROMPT, "chat/completions": CHAT, "responses": {"input": "Hi"}}[path]
    assert served.refused(f"/v1/{path}", **prompt, **fields)["message"] == message


def test_limits_of_a_bias_are_shown_as_they_are(served):
    for bias in (10001, -10001):
        assert "10000" in served.refused("/v1/completions", prompt="a", logit_bias={"5": bias})["message"]
    fields = served.http.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    assert '"maximum": 10000' in json.dumps(fields["logit_bias"])


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


@pytest.mark.parametrize(
    ("path", "field", "fields"),
    [
        ("/v1/completions", "prompt", {"prompt": "a" * 20_000}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "a" * 20_000}]}),
        ("/v1/responses", "input", {"input": "a" * 20_000}),
    ],
)
def test_a_far_longer_prompt_is_not_tokenized(served, start, chat_lm, monkeypatch, path, field, fields):
    monkeypatch.setattr(prompts, "tokenize", None)
    error = served.refused(path, **fields)
    assert re.fullmatch(
        r"the prompt has at least 2,5\d\d tokens, but the model's context holds 256: shorten it", error["message"]
    )
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    with start({"tiny": chat_lm}, limits=Limits(max_prompt_tokens=20)) as server:
        error = server.refused(path, **fields)
        assert re.fullmatch(r"the prompt has at least 2,5\d\d tokens, and this server's limit is 20", error["message"])


def test_a_hostile_chat_template_costs_one_request(start, chat_lm):
    hostile = replace(chat_lm, tokenizer=byte_tokenizer("{{ 'a' * 10**9 }}"))
    with start({"tiny": chat_lm, "hostile": hostile}) as server:
        error = server.refused("/v1/chat/completions", model="hostile", **CHAT)
        assert error["message"].endswith("refuses these messages: it needs more than 256 MB of memory")
        assert server.post("/v1/chat/completions", **CHAT).status_code == 200


def test_no_message_shows_where_files_are(served, chat_lm):
    folder = str(chat_lm.source)
    for fields in ({"prompt": "a" * 256}, {"prompt": [999]}, {"model": "x"}, {"prompt": "a", "stop_token_ids": [999]}):
        assert folder not in served.post("/v1/completions", **{"prompt": "a", **fields}).text
    assert folder not in served.http.get("/v1/models").text


def test_limits(start, chat_lm):
    limits = Limits(max_body_bytes=2000, max_prompts=2, max_prompt_tokens=20, max_tokens=30, max_beams=4)
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
    both = {"add_generation_prompt": True, "continue_final_message": True}
    for path in ("/tokenize", "/v1/chat/completions"):
        error = served.refused(path, **CHAT, **both)
        assert error["param"] == "continue_final_message"
        assert "leave one out" in error["message"]
    assert served.refused("/tokenize")["param"] == "prompt"
    assert served.refused("/detokenize", tokens=[300])["param"] == "tokens"


def test_the_list_of_models(served):
    models = served.client().models.list().data
    assert [model.id for model in models] == ["tiny", "plain"]
    assert served.client().models.retrieve("plain") == models[1]
