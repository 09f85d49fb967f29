"""What a request gets that does not say how to sample, and what an operator says."""

import pytest

import specbeam
from specbeam.models.sampling_defaults import FALLBACK
from tests.server.conftest import serving_alone

HI = [{"role": "user", "content": "Hi"}]
ENDPOINTS = {
    "/v1/completions": {"prompt": "ab ab", "max_tokens": 9},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 9},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 9},
}
GREEDY = {"seed": 5, "temperature": 0}


def text_of(server, path, **fields):
    """The text of the answer to a request."""
    made = server.post(path, **ENDPOINTS[path], **fields).json()
    if "output" in made:
        return made["output"][0]["content"][0]["text"]
    (choice,) = made["choices"]
    return choice.get("text") or choice["message"]["content"]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"seed": 5}, {**FALLBACK.settings, "seed": 5}),
        ({"seed": 5, "top_p": 0.5}, {**FALLBACK.settings, "seed": 5, "top_p": 0.5}),
        ({"seed": 5, "temperature": 1, "top_p": 1, "repetition_penalty": 1}, {"temperature": 1.0, "seed": 5}),
        (GREEDY, {}),
        ({"num_beams": 3}, {"num_beams": 3}),
        ({"use_beam_search": True}, {}),
        ({"num_beams": 3, "top_k": 5, "seed": 5}, {**FALLBACK.settings, "num_beams": 3, "top_k": 5, "seed": 5}),
    ],
)
def test_fields_of_the_request_win_and_the_model_has_the_rest(served, chat_lm, path, fields, options):
    raw = path == "/v1/completions"
    expected = specbeam.generate(chat_lm, "ab ab" if raw else HI, raw=raw, max_new_tokens=9, **options).text
    assert text_of(served, path, **fields) == expected


def test_the_list_of_models_has_the_defaults(served):
    assert served.client().models.retrieve("tiny").sampling == FALLBACK.settings


def test_the_scores_of_a_prompt_do_not_depend_on_sampling(served):
    how = {"prompt": "ab ab", "echo": True, "logprobs": 1}
    scores = [
        served.choices(**how, max_tokens=tokens, **more)[0]["logprobs"]["token_logprobs"][:5]
        for tokens in (0, 1)
        for more in ({}, {"temperature": 0})
    ]
    assert scores[1:] == scores[:-1]


def test_the_operator_says_how(start, chat_lm):
    own = {"temperature": 0.5, "repetition_penalty": 1.5}
    with start({"tiny": chat_lm}, sampling=own) as server:
        for fields, options in (
            ({"seed": 5}, {**FALLBACK.settings, **own, "seed": 5}),
            ({"seed": 5, "temperature": 0.9}, {**FALLBACK.settings, **own, "temperature": 0.9, "seed": 5}),
            (GREEDY, {"repetition_penalty": 1.5}),
            ({"num_beams": 3}, {"num_beams": 3, "repetition_penalty": 1.5}),
        ):
            expected = specbeam.generate(chat_lm, HI, max_new_tokens=9, **options).text
            assert text_of(server, "/v1/chat/completions", **fields) == expected


def test_the_start_says_how_and_flags_change_it(chat_lm):
    command = ("--model", f"tiny={chat_lm.source}", "--backend", "cpu", "--dtype", "float32")
    with serving_alone(*command, "--temperature", "0", "--top-p", "0.5") as server:
        assert text_of(server, "/v1/chat/completions") == specbeam.generate(chat_lm, HI, max_new_tokens=9).text
        server.process.terminate()
        server.process.wait()
    says = "takes the likeliest token (greedy), as you say"
    assert f"specbeam: tiny {says}; a request may say otherwise\n" in server.log
