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
    ("fields", "param"),
    [
        (fields, param)
        for param, fields in [
            ("temperature", {"temperature": -1}),
            ("temperature", {"temperature": "hot"}),
            ("top_p", {"top_p": 0}),
            ("min_p", {"min_p": 1.5}),
            ("n", {"n": 0}),
            ("n", {"n": True}),
            ("n", {"n": 4, "num_beams": 2}),
            ("seed", {"seed": 1.5}),
            ("seed", {"seed": 2**64}),
            ("seed", {"seed": -(2**63) - 1}),
            ("logit_bias", {"logit_bias": {"99999": 1}}),
            ("logit_bias", {"logit_bias": {"a": 1}}),
            ("logit_bias", {"logit_bias": {"1": 1e9}}),
            ("logit_bias", {"logit_bias": {"1": -10001}}),
            ("logit_bias", {"logit_bias": {"1_0": 1}}),
            ("logit_bias", {"logit_bias": {"+1": 1}}),
            ("stop", {"stop": ""}),
            ("stop", {"stop": 5}),
            ("max_tokens", {"max_tokens": -1}),
            ("min_tokens", {"min_tokens": 9, "max_tokens": 3}),
            ("top_p", {"top_p": 0.9, "temperature": 0, "num_beams": 2}),
            ("stop_token_ids", {"stop_token_ids": [999]}),
            ("frequency_penalty", {"frequency_penalty": 3}),
            ("repetition_penalty", {"repetition_penalty": 0}),
            ("length_penalty", {"length_penalty": 1}),
            ("early_stopping", {"early_stopping": "sometimes", "num_beams": 2}),
            ("use_beam_search", {"use_beam_search": True, "num_beams": 2}),
            ("best_of", {"best_of": 2, "n": 3}),
            ("best_of", {"best_of": 3, "n": 2, "stream": True}),
            ("draft", {"draft": "unknown"}),
            ("num_draft_tokens", {"num_draft_tokens": 3}),
            ("draft_temperature", {"draft_temperature": 3, "draft": "ngram"}),
            ("stream_options", {"stream_options": {"include_usage": True}}),
            ("stream_options", {"stream": True, "stream_options": {"unknown": True}}),
            ("store", {"store": True}),
            ("guided_json", {"guided_json": {}}),
            ("temprature", {"temprature": 1}),
        ]
    ],
)
def test_fields_of_every_endpoint(served, fields, param):
    for path, more in {
        "/v1/completions": PROMPT,
        "/v1/chat/completions": CHAT,
        "/v1/responses": {"input": "Hi"},
    }.items():
        own = {**fields}
        if path == "/v1/responses":
            if "max_tokens" in own:
                own["max_output_tokens"] = own.pop("max_tokens")
            if param == "stream_options" and "stream" not in own:
                continue
        error = served.refused(path, **more, **own)
        expected = "max_output_tokens" if path == "/v1/responses" and param == "max_tokens" else param
        if param == "best_of" and path == "/v1/responses":
            continue  # n is refused before
        if param == "n" and path == "/v1/responses":
            expected = "n"
        assert error["param"] == expected, error
        assert expected in error["message"]
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "field",
    [
        "tools",
        "functions",
        "response_format",
        "audio",
        "prediction",
        "web_search_options",
        "reasoning_effort",
        "modalities",
    ],
)
def test_fields_for_other_models(served, field):
    value = {"type": "json_object"} if field == "response_format" else [{"type": "function"}]
    error = served.refused("/v1/chat/completions", **CHAT, **{field: value})
    assert error["param"] == field
    if field in ("tools", "functions", "audio", "prediction", "web_search_options"):
        assert error["message"] == f"{field} is not supported: remove it"


@pytest.mark.parametrize(
    "field", ["previous_response_id", "conversation", "background", "reasoning", "tools", "truncation"]
)
def test_fields_of_responses(served, field):
    value = True if field == "background" else [{"type": "function"}] if field == "tools" else "auto"
    assert served.refused("/v1/responses", input="Hi", **{field: value})["param"] == field


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"content": "Hi"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "robot", "content": "Hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "Hi", "name": "<|im_end|>"}],
        [{"role": "user", "content": "Hi", "refusal": "No"}],
        [{"role": "user", "content": "\ud800"}],
        "Hi",
    ],
)
def test_messages(served, messages):
    body = json.dumps({"messages": messages})  # with half a surrogate pair escaped
    response = served.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_a_field_of_a_message_is_named(served):
    image = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
    error = served.refused("/v1/chat/completions", messages=[{"role": "user", "content": image}])
    assert error["message"] == "messages[0].content[0].type: Input should be 'text'"
    error = served.refused("/v1/chat/completions", messages=[{"role": "user", "content": "Hi", "refusal": "No"}])
    assert error["message"] == "refusal is not supported: remove it"
    error = served.refused("/v1/chat/completions", messages=[{"role": "user", "content": None}])
    assert (error["message"], error["code"]) == ("messages[0].content: Field required", "missing_parameter")
    error = served.refused("/v1/responses", input=[{"role": "user"}])
    assert error["message"] == "input[0].content: Field required"


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [1, -1], [1, "a"], [300], [[300]], None, {"a": 1}, 5])
def test_prompts(served, prompt):
    assert served.refused("/v1/completions", prompt=prompt)["param"] == "prompt"


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "null", '"a"', '{"prompt": NaN}', "[" * 100_000, '{"prompt": 1' + "0" * 9999 + "}"]
)
def test_bodies_that_are_no_request(served, body):
    response = served.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2}', "max_tokens"),
        (
            b'{"prompt": "a", "stream": true, "stream_options": {"include_usage": true, "include_usage": false}}',
            "include_usage",
        ),
        (b'{"prompt": "\xff"}', None),
        ('{"prompt": "a"}'.encode("utf-16"), None),
    ],
)
def test_a_value_that_would_be_ignored_or_guessed(served, body, param):
    response = served.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert ("twice" if param else "UTF-8") in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "the body is empty: send a JSON object"),
        (" \n", "the body is empty: send a JSON object"),
        ("{", "the body is cut off: its JSON ends too early, at line 1, column 2"),
        ('{"prompt": "a', "the body is cut off: its JSON ends too early, at line 1, column 14"),
        ('{"prompt": "a",\n "max_tokens": 1', "the body is cut off: its JSON ends too early, at line 2, column 17"),
        ('{"prompt": "a", "stream": tru', "the body is cut off: its JSON ends too early, at line 1, column 30"),
        ('{"prompt": "a"} x', "the body is not valid JSON: Extra data at line 1, column 17"),
        ('{"prompt": "a",\n}', "the body is not valid JSON: "),
        ('{"prompt":\n a}', "the body is not valid JSON: Expecting value at line 2, column 2"),
        ('\ufeff{"prompt": "a"}', "the body begins with a byte order mark: send UTF-8 without one"),
        ("[]", "the body must be a JSON object"),
        ("null", "the body must be a JSON object"),
    ],
)
def test_bodies_are_told_what_is_wrong_with_them(served, body, says):
    response = served.http.post("/v1/completions", content=body.encode(), headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(says)


def test_an_encoded_body_is_refused_as_such(served):
    body = gzip.compress(json.dumps(PROMPT).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = served.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_content_encoding"
    assert "Content-Encoding 'gzip'" in response.json()["error"]["message"]
    body, headers["content-encoding"] = json.dumps(PROMPT | {"max_tokens": 1}), "identity"
    assert served.http.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_limits_are_shown_as_they_are(served):
    assert served.refused("/v1/completions", prompt="a", seed=2**64)["message"] == (
        "seed: Input should be less than 18446744073709551616"
    )
    for bias in (10001, -10001):
        assert "10000" in served.refused("/v1/completions", prompt="a", logit_bias={"5": bias})["message"]
    fields = served.http.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    assert '"maximum": 10000' in json.dumps(fields["logit_bias"])


def test_a_body_without_its_type(served):
    response = served.http.post("/v1/completions", content=json.dumps(PROMPT), headers={"content-type": "text/plain"})
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


def test_the_nearest_name_is_suggested(served):
    assert "temperature" in served.refused("/v1/completions", **PROMPT, temprature=1)["message"]
    assert "max_output_tokens" in served.refused("/v1/responses", input="Hi", max_tokens=1)["message"]
    for path, fields in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        error = served.refused(path, **fields, n_predict=5)
        assert error["message"] == "n_predict is not supported: did you mean max_tokens?"
    error = served.refused("/v1/chat/completions", **CHAT, predictions=5)  # like prediction, which is refused, too
    assert error["message"] == "predictions is not supported: remove it"


def test_an_empty_stop_string_is_shown_as_it_was_given(served):
    for stop in ("", ["a", ""]):
        error = served.refused("/v1/completions", **PROMPT, stop=stop)
        assert error["message"] == "stop='' is not allowed: give text that is not empty"


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


@pytest.mark.parametrize(
    ("path", "limit", "prompt"),
    [
        ("/v1/completions", "max_tokens", {"prompt": "a" * 250}),
        ("/v1/completions", "max_tokens", {"prompt": "a" * 250, "echo": True, "n": 2, "stream": True}),
        ("/v1/completions", "max_tokens", {"prompt": "a" * 250, "num_beams": 3}),
        ("/rounds/completions", "max_tokens", {"prompt": "a" * 250}),
        ("/v1/chat/completions", "max_tokens", {"messages": [{"role": "user", "content": "a" * 231}]}),
        ("/v1/chat/completions", "max_completion_tokens", {"messages": [{"role": "user", "content": "a" * 231}]}),
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


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "a" * 250}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 231}]}),
        ("/v1/responses", {"input": "a" * 231}),
    ],
)
def test_without_a_number_of_new_tokens_a_text_may_fill_the_context(served, path, prompt):
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
