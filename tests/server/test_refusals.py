"""Fields that cannot be honoured are refused, in OpenAI's shape and with the name of the field. Nothing is ignored."""

import gzip
import json
import re

import pytest
from openai import NotFoundError

from specbeam.models import prompts
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
    (ALL, {"stop_token_ids": [[999]], "frequency_penalty": [3], "repetition_penalty": [0], "length_penalty": [2]}),
    (ALL, {"draft": ["unknown"], "num_draft_tokens": [3], "guided_json": [{}]}),
    (TWO, {"max_tokens": [-2], "mirostat": [2], "repeat_penalty": [1.1], "skip_special_tokens": [False]}),
    (CHATS, {"modalities": [FUNCTION], "reasoning_effort": [FUNCTION]}),
    (RESPONSES, {"max_output_tokens": [-2, 0], "reasoning": ["auto", {"effort": "huge"}], "truncation": ["auto"]}),
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


PROSE = {"prompt": "Hi", "model": "tiny", "max_tokens": 4, "seed": 5, "temperature": 1.1, "top_p": 0.9, "stream": False}
SILLY_TAVERN = {
    **{"max_new_tokens": 4, "n_predict": 4, "num_predict": 4, "sampler_seed": 5, "typical_p": 1, "typical": 1},
    **{"min_p": 0, "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0, "top_k": 0, "skew": 0},
    **{
        "add_bos_token": True,
        "smoothing_factor": 0,
        "smoothing_curve": 1,
        "dry_allowed_length": 2,
        "dry_multiplier": 0,
    },
    **{"dry_base": 1.75, "dry_sequence_breakers": '["\\n"]', "dry_penalty_last_n": 0, "max_tokens_second": 0},
    **{"stopping_strings": ["\nUser:"], "stop": ["\nUser:"], "truncation_length": 8192, "ban_eos_token": False},
    **{"skip_special_tokens": True, "include_reasoning": True, "top_a": 0, "tfs": 1, "mirostat_mode": 0},
    **{"mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "", "banned_strings": [], "api_type": "generic"},
    **{"api_server": "http://127.0.0.1:8000", "xtc_threshold": 0.1, "xtc_probability": 0, "nsigma": 0},
    **{"top_n_sigma": 0, "min_keep": 0, "adaptive_target": -0.01, "adaptive_decay": 0.9, "rep_pen": 1},
    **{"rep_pen_range": 0, "repetition_penalty_range": 0, "guidance_scale": 1, "negative_prompt": ""},
    **{"repeat_penalty": 1, "repeat_last_n": 0, "num_ctx": 8192, "mirostat": 0, "ignore_eos": False},
    "rep_pen_slope": 1,
}
"""What SillyTavern sends to a server of text completions, with all its samplers switched off."""
VLLM = {
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False},
    **{"bad_words": [], "length_penalty": 1.0, "early_stopping": False, "request_id": "a", "ignore_eos": False},
    **{"use_beam_search": False, "stop_token_ids": [], "min_tokens": 0, "repetition_penalty": 1.0},
}
LLAMA_CPP = {
    **{"cache_prompt": True, "id_slot": -1, "n_keep": 0, "mirostat": 0, "dynatemp_range": 0.0, "tfs_z": 1.0},
    **{"samplers": None, "timings_per_token": False, "repeat_penalty": 1.0, "repeat_last_n": 64, "grammar": ""},
}
OPENAI = {"store": True, "service_tier": "flex", "prompt_cache_options": {"mode": "implicit"}, "user": "a"}
CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize("fields", [SILLY_TAVERN, VLLM, LLAMA_CPP, OPENAI])
def test_neutral_fields_change_no_text(served, fields):
    assert served.choices(**PROSE, **fields) == served.choices(**PROSE)


def test_neutral_fields_of_conversations(served):
    parts = [{"type": "text", "text": "Hi", **CACHED}]
    tool = {"type": "function", "function": {"name": "f"}}
    how = {"seed": 5, "max_tokens": 4, "repetition_penalty": 1, "min_tokens": 0}
    plain = served.choices(CHATS, messages=[USER | {"content": [{"type": "text", "text": "Hi"}]}], **how)
    for more in (OPENAI, VLLM, LLAMA_CPP, {"reasoning_effort": "high", "verbosity": "low", "top_logprobs": 0}):
        assert served.choices(CHATS, messages=[USER | CACHED | {"content": parts}], **how | more) == plain
    answer = served.post(CHATS, messages=[USER], tools=[tool | CACHED], tool_choice="none")
    assert answer.status_code == 200
    more = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": True,
    }
    answer = served.post(RESPONSES, input="Hi", text={"verbosity": "high"}, **more).json()
    assert (answer["store"], answer["output"][0]["content"][0]["logprobs"]) == (False, [])


def test_one_answer_names_all_fields_that_are_refused(served):
    error = served.refused(
        COMPLETIONS, **PROMPT, mirostat=2, xtc_probability=0.5, repeat_penalty=1.1, n=0, foo=1, bar=2
    )
    assert error["message"] == (
        "foo, bar are not supported: remove them; n: Input should be greater than or equal to 1; "
        "mirostat: Input should be 0; xtc_probability: Input should be 0; "
        "repeat_penalty is not supported: did you mean repetition_penalty?"
    )
    many = {name: 9 for name in SILLY_TAVERN if name not in ("max_tokens", "stop", "top_k", "min_p", "ignore_eos")}
    error = served.refused(COMPLETIONS, **PROMPT, **many)
    assert [
        name for name in ("mirostat", "top_a", "tfs", "n_predict", "stopping_strings") if name not in error["message"]
    ] == []


@pytest.mark.parametrize("name", ["repeat_last_n", "rep_pen_range", "repetition_penalty_range"])
def test_penalties_over_a_window_are_refused(served, name):
    """As long as there are penalties. All tokens are no window."""
    assert served.refused(COMPLETIONS, **PROMPT, repetition_penalty=1.2, **{name: 64})["param"] == name
    assert served.refused(COMPLETIONS, **PROMPT, frequency_penalty=1, **{name: 64})["param"] == name
    assert served.post(COMPLETIONS, **PROMPT, repetition_penalty=1.2, **{name: -1}).status_code == 200
    assert served.post(COMPLETIONS, **PROMPT, **{name: 64}).status_code == 200


IMAGE = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
MESSAGES = {
    "messages": [[], "Hi"],
    "messages[0].content: Field required": [[{"role": "user"}], [USER | {"content": None}]],
    "messages[0].role: Field required": [[{"content": "Hi"}]],
    "messages[0].content[0].type: 'image_url' is not supported, because specbeam reads text only": [
        [USER | {"content": IMAGE}]
    ],
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
def test_the_context_ends_a_text_whose_limit_is_above_it(served, path, limit, prompt):
    """Clients send their default. The prompt has 250 tokens, and the context holds 256."""
    how = {"temperature": 0, "ignore_eos": True}
    if path == ROUNDS:
        lines = [served.post(path, **prompt, **how, **{limit: most}).text.splitlines() for most in (50, 6)]
        assert [len(one) for one in lines] == [len(lines[0])] * 2
        return
    answers = [served.post(path, **prompt, **how, **{limit: most}) for most in (-1, 10**6, 50, 6)]
    assert {answer.status_code for answer in answers} == {200}
    if "stream" not in prompt:
        bodies = [answer.json() for answer in answers]
        ends = [body.get("incomplete_details") or body["choices"][0]["finish_reason"] for body in bodies]
        assert ends in ([{"reason": "max_output_tokens"}] * 4, ["length"] * 4)
        assert {body["usage"]["total_tokens"] for body in bodies} == {256}


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
        for name, value in (("prompt", ["a"] * 3), ("num_beams", 5), ("n", 5), ("best_of", 5)):
            assert server.refused("/v1/completions", **{"prompt": "a", name: value})["param"] == name
        error = server.refused("/v1/completions", prompt="a" * 21, max_tokens=1)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        usage = server.post("/v1/completions", prompt="a", max_tokens=31, ignore_eos=True).json()["usage"]
        assert usage["completion_tokens"] == 30  # the limit ends a text
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
