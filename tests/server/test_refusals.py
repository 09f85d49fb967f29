"""Fields that cannot be honoured are refused, in OpenAI's shape and with the name of the field. Nothing is ignored."""

import gzip
import json
import re

import pytest
from openai import NotFoundError

from specbeam import prompts
from specbeam.server.limits import Limits
from tests.conftest import of_transformers

USER = {"role": "user", "content": "Hi"}
CHAT = {"messages": [USER]}
PROMPT = {"prompt": "Hi"}
LONG_CHAT = {"messages": [{"role": "user", "content": "a" * 231}]}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, ROUNDS = "/v1/responses", "/rounds/completions"
ONE_PROMPT = {COMPLETIONS: PROMPT, CHATS: CHAT, RESPONSES: {"input": "Hi"}, ROUNDS: PROMPT}
TWO, ALL = f"{COMPLETIONS} {CHATS}", f"{COMPLETIONS} {CHATS} {RESPONSES}"
FUNCTION, CHOICE = [{"type": "function"}], {"structured_outputs": {"choice": ["a", "b", "b"]}}
WRONG = [
    (ALL, {"temperature": [-1, "hot"], "top_p": [0], "min_p": [1.5], "n": [0, True], "seed": [1.5, -(2**63) - 1]}),
    (ALL, {"logit_bias": [{"99999": 1}, {"a": 1}, {"1": 1e9}, {"1_0": 1}, {"+1": 1}], "stop": ["", 5]}),
    (ALL, {"stop_token_ids": [[999]], "frequency_penalty": [3], "repetition_penalty": [0], "length_penalty": [1]}),
    (ALL, {"draft": ["unknown"], "num_draft_tokens": [3], "store": [True], "guided_json": [{}]}),
    (TWO, {"max_tokens": [-1]}),
    (CHATS, {"modalities": [FUNCTION], "reasoning_effort": [FUNCTION]}),
    (RESPONSES, {"max_output_tokens": [-1], "reasoning": ["auto", {"effort": "low"}], "truncation": ["auto"]}),
    (RESPONSES, {"background": [True], "return_token_ids": [True], "n": [2]}),
    (ROUNDS, {"n": [2], "best_of": [2], "prompt": [["a", "b"]], "stream": [False], "echo": [True], "num_beams": [99]}),
    (ROUNDS, {"return_token_ids": [True]}),
]
"""Values that are refused without other fields."""
UNSUPPORTED = [
    *((CHATS, name) for name in ("functions", "audio", "prediction", "web_search_options")),
    (CHATS, "predictions"),  # not to be called prediction, which is refused, too
    *((RESPONSES, name) for name in ("previous_response_id", "conversation")),
]


@pytest.mark.parametrize(
    ("paths", "fields", "message"),  # the first field is wrong
    [
        *((paths, {name: value}, "") for paths, names in WRONG for name in names for value in names[name]),
        *((path, {name: FUNCTION}, f"{name} is not supported: remove it") for path, name in UNSUPPORTED),
        (ALL, {"top_p": 0.9, "temperature": 0, "num_beams": 2}, ""),
        (ALL, {"early_stopping": "sometimes", "num_beams": 2}, ""),
        (ALL, {"use_beam_search": True, "num_beams": 2}, ""),
        (ALL, {"draft_temperature": 3, "draft": "ngram"}, ""),
        (ALL, {"stream_options": {"unknown": True}, "stream": True}, ""),
        (ALL, {"seed": 2**64}, "seed: Input should be less than 18446744073709551616"),
        (ALL, {"logit_bias": {"5": 10001}}, "logit_bias: Input should be less than or equal to 10000"),
        (ALL, {"logit_bias": {"5": -10001}}, "logit_bias: Input should be greater than or equal to -10000"),
        (ALL, {"stop": ["a", ""]}, "stop='' is not allowed: give text that is not empty"),
        (ALL, {"temprature": 1}, "temprature is not supported: did you mean temperature?"),
        (TWO, {"min_tokens": 9, "max_tokens": 3}, "min_tokens=9 is more than max_tokens=3"),
        (TWO, {"n": 4, "num_beams": 2}, "n=4 is more than num_beams=2: give at most 2, or more beams"),
        (TWO, {"n": 3, "num_beams": 4, **CHOICE}, "n=3 is more than the 2 texts of structured_outputs.choice"),
        (TWO, {"best_of": 2, "n": 3}, ""),
        (TWO, {"best_of": 3, "n": 2, "stream": True}, ""),
        (TWO, {"stream_options": {"include_usage": True}}, ""),
        (ROUNDS, {"stream_options": {"include_usage": True}, "stream": True}, ""),
        (TWO, {"n_predict": 5}, "n_predict is not supported: did you mean max_tokens?"),
        (COMPLETIONS, {"guided_choice": ["a"]}, "guided_choice is not supported: did you mean structured_outputs?"),
        (RESPONSES, {"min_tokens": 9, "max_output_tokens": 3}, "min_tokens=9 is more than max_output_tokens=3"),
        (RESPONSES, {"max_tokens": 1}, "max_tokens is not supported: did you mean max_output_tokens?"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content: Field required"),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": 1}]}, "input[0].summary: Input should be a valid list"),
    ],
)
def test_a_wrong_field_is_named(served, paths, fields, message):
    """The message, where it is given, names the value and what to do."""
    for path in paths.split():
        error = served.refused(path, **ONE_PROMPT[path] | fields)
        assert error["param"] == next(iter(fields))
        assert error["param"] in error["message"]
        assert error["type"] == "invalid_request_error"
        assert error["message"] == message or not message


IMAGE = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
MESSAGES = {
    "messages": [[], "Hi"],
    "messages[0].content: Field required": [[{"role": "user"}], [USER | {"content": None}]],
    "messages[0].role: Field required": [[{"content": "Hi"}]],
    "messages[0].content[0].type: Input should be 'text'": [[USER | {"content": IMAGE}]],
    "refusal is not supported: remove it": [[USER | {"refusal": "No"}]],
    "": [[USER | {"role": "robot"}], [USER | {"name": "<|im_end|>"}], [USER | {"content": "\ud800"}]],
}


@pytest.mark.parametrize(("says", "messages"), [(says, one) for says, wrong in MESSAGES.items() for one in wrong])
def test_messages(served, says, messages):
    body = json.dumps({"messages": messages})  # with half a surrogate pair escaped
    error = refusal_of(served, body, path="/v1/chat/completions")
    assert error["param"] == "messages"
    assert error["message"].startswith(says)
    assert (error["code"] == "missing_parameter") == ("Field required" in says)


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [1, -1], [1, "a"], [300], [[300]], None, {"a": 1}, 5])
def test_prompts(served, prompt):
    assert served.refused("/v1/completions", prompt=prompt)["param"] == "prompt"


def refusal_of(served, body, status=400, path="/v1/completions", **headers):
    """The error of a body that must be refused."""
    response = served.http.post(path, content=body, headers={"content-type": "application/json"} | headers)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


CUT_OFF = "the body is cut off: its JSON ends too early, at line "
BODIES = {
    "the body is empty: send a JSON object": ["", " \n"],
    f"{CUT_OFF}1, column 2": ["{"],
    f"{CUT_OFF}1, column 14": ['{"prompt": "a'],
    f"{CUT_OFF}2, column 17": ['{"prompt": "a",\n "max_tokens": 1'],
    f"{CUT_OFF}1, column 30": ['{"prompt": "a", "stream": tru'],
    "the body is not valid JSON: Extra data at line 1, column 17": ['{"prompt": "a"} x'],
    "the body is not valid JSON: ": ['{"prompt": "a",\n}'],
    "the body is not valid JSON: Expecting value at line 2, column 2": ['{"prompt":\n a}'],
    "the body begins with a byte order mark: send UTF-8 without one": ['\ufeff{"prompt": "a"}'],
    "the body must be a JSON object": ["[]", "null", '"a"'],
    "the body cannot be read: send JSON in UTF-8": [b'{"prompt": "\xff"}', '{"prompt": "a"}'.encode("utf-16")],
    "max_tokens is given twice": ['{"prompt": "a", "max_tokens": 1, "max_tokens": 2}'],
    "include_usage is given twice": ['{"stream_options": {"include_usage": true, "include_usage": 0}}'],
    "": ['{"prompt": NaN}', "[" * 100_000, '{"prompt": 1' + "0" * 9999 + "}"],
}


@pytest.mark.parametrize(("says", "body"), [(says, body) for says, bodies in BODIES.items() for body in bodies])
def test_bodies_are_told_what_is_wrong_with_them(served, says, body):
    error = refusal_of(served, body)
    assert error["message"].startswith(says)
    if says.endswith("twice"):
        assert error["param"] == says.split()[0]


def test_an_encoded_body_is_refused_as_such(served):
    error = refusal_of(served, gzip.compress(json.dumps(PROMPT).encode()), 415, **{"content-encoding": "gzip"})
    assert error["code"] == "unsupported_content_encoding"
    assert "Content-Encoding 'gzip'" in error["message"]
    answer = served.http.post("/v1/completions", json=PROMPT, headers={"content-encoding": "identity"})
    assert answer.status_code == 200


def test_a_body_without_its_type(served):
    assert "application/json" in refusal_of(served, json.dumps(PROMPT), **{"content-type": "text/plain"})["message"]


def test_clients_raise_their_own_errors(served):
    client = served.client()
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
    for fields in ({"prompt": "a" * 300}, {"prompt": "a" * 257, "max_tokens": 0, "echo": True}):
        error = served.refused("/v1/completions", **fields)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert "256" in error["message"]


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


def test_of_a_far_longer_prompt_a_beginning_is_tokenized(served, start, chat_lm, monkeypatch):
    tokenize = prompts.tokenize

    def of_short_texts(tokenizer, text, *more):
        assert len(text) < 20_000
        return tokenize(tokenizer, text, *more)

    monkeypatch.setattr(prompts, "tokenize", of_short_texts)
    text = "a" * 20_000
    fields = {"prompt": text, "messages": [{"role": "user", "content": text}], "input": text}
    begins = r"the prompt has at least \d,\d\d\d tokens, "
    with start({"tiny": chat_lm}, limits=Limits(max_prompt_tokens=20)) as small:
        for path, (param, value) in zip(ALL.split(), fields.items(), strict=True):
            error = served.refused(path, **{param: value})
            assert re.fullmatch(
                f"{begins}but the model's context holds 256, which must hold .* too: shorten it", error["message"]
            )
            assert (error["param"], error["code"]) == (param, "context_length_exceeded")
            error = small.refused(path, **{param: value})
            assert re.fullmatch(f"{begins}and this server's limit is 20", error["message"])


def test_no_message_shows_where_files_are(served, chat_lm):
    folder = str(chat_lm.source)
    for fields in ({"prompt": "a" * 256}, {"prompt": [999]}, {"model": "x"}, {"stop_token_ids": [999]}):
        assert folder not in served.post("/v1/completions", **{"prompt": "a", **fields}).text
    assert folder not in served.http.get("/v1/models").text


def test_limits(start, chat_lm):
    sizes = {"max_body_bytes": 2000, "max_prompts": 2, "max_prompt_tokens": 20, "max_cache_tokens": 49}
    limits = Limits(**sizes, max_tokens=30, max_beams=4)
    with start({"tiny": chat_lm}, limits=limits) as server:
        for name, value in (("prompt", ["a"] * 3), ("max_tokens", 31), ("num_beams", 5), ("n", 5), ("best_of", 5)):
            assert server.refused("/v1/completions", **{"prompt": "a", name: value})["param"] == name
        error = server.refused("/v1/completions", prompt="a" * 21, max_tokens=1)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        error = server.refused("/v1/completions", prompt="a" * 20, max_tokens=30)
        assert error["param"] == "max_tokens"
        assert re.search("49.* the server's --max-cache-tokens", error["message"])
        assert server.post("/v1/completions", prompt="a" * 20, max_tokens=29).status_code == 200
        assert server.refused("/v1/completions", 413, prompt="a" * 3000)["code"] == "body_too_large"
        chunks = (b" " * 1000 for _ in range(100))  # no Content-Length
        assert server.http.post("/v1/completions", content=chunks).status_code == 413
        empty = [{"role": "user", "content": ""}]
        answer = server.post("/v1/chat/completions", messages=empty, temperature=0, ignore_eos=True)
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


def test_a_constraint_that_leaves_no_text_is_named_as_a_client_knows_it(served):
    """Not by the library's options: HTTP has no logits_processor."""
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
    chat = of_transformers(chat_lm.tokenizer).apply_chat_template(CHAT["messages"], add_generation_prompt=True)[
        "input_ids"
    ]
    assert served.tokens(**CHAT) == served.tokens(**CHAT, add_special_tokens=False) == chat
    assert served.refused("/tokenize", **CHAT, add_special_tokens=True)["param"] == "add_special_tokens"
    assert served.refused("/tokenize", prompt="a", add_generation_prompt=True)["param"] == "add_generation_prompt"
    assert served.refused("/tokenize")["param"] == "prompt"
    assert served.refused("/detokenize", tokens=[300])["param"] == "tokens"


def test_the_list_of_models(served):
    models = served.client().models.list().data
    assert [(model.id, model.has_chat_template) for model in models] == [("tiny", True), ("plain", False)]
    assert all(model.drafts == ["small", "ngram", "suffix", "none"] for model in models)
    assert served.client().models.retrieve("plain") == models[1]
