"""The rounds of the engine as server-sent events."""

import json

import pytest

import specbeam
from specbeam.options import Options
from specbeam.recording import begin, events

SIZES = {"num_draft_tokens": 3, "draft_width": 2, "draft_budget": 6}
BEAMS = {"num_beams": 4, "draft": "ngram", "temperature": 0, **SIZES}
DRAWN = {"temperature": 0.8, "seed": 3, "draft": "small", **SIZES}


def watched(served, path, **fields):
    with served.http.stream("POST", path, json=fields) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def without_times(rounds):
    return [
        {name: value for name, value in one.items() if name not in ("pass", "event", "drafted")}
        | {"drafted": [token | {"accepted": None} for token in one["drafted"]]}
        for one in rounds
    ]


@pytest.mark.parametrize("fields", [BEAMS, {"temperature": 0}, DRAWN])
def test_the_events_are_the_trace_of_the_engine(served, chat_lm, draft_lm, fields):
    first, *rounds, last = watched(
        served, "/rounds/completions", prompt="ab ab ab", max_tokens=24, logprobs=3, **fields
    )
    options = {name: value for name, value in fields.items() if name != "draft"}
    draft = {"small": draft_lm, None: None}.get(fields.get("draft"), fields.get("draft"))
    here = specbeam.generate(
        chat_lm, "ab ab ab", raw=True, max_new_tokens=24, top_logprobs=3, trace=True, draft=draft, **options
    )
    assert first["event"] == "begin"
    assert [token["token_id"] for token in first["prompt"]] == chat_lm.tokenizer("ab ab ab").input_ids
    assert "".join(token["text"] for token in first["prompt"]) == "ab ab ab"
    assert without_times(rounds) == without_times(here.trace)
    assert {one["event"] for one in rounds} == {"round"}
    assert last["event"] == "end"
    assert [text["token_ids"] for text in last["sequences"]] == [text.token_ids for text in here.sequences]
    assert [text["score"] for text in last["sequences"]] == [text.score for text in here.sequences]
    assert last["stats"]["target_passes"] == here.stats.target_passes


def test_the_text_is_that_of_the_openai_endpoint(served):
    fields = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, **BEAMS, "n": 2, "stop": "zz"}
    *_, last = watched(served, "/rounds/chat", **fields)
    answer = served.post("/v1/chat/completions", **fields).json()
    assert [text["text"] for text in last["sequences"]] == [one["message"]["content"] for one in answer["choices"]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"stream": False}, "stream"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"echo": True}, "echo"),
        ({"num_beams": 99}, "num_beams"),
    ],
)
def test_refusals_name_the_field(served, fields, param):
    error = served.refused("/rounds/completions", **{"prompt": "a", **fields})
    assert error["param"] == param


def test_models_say_what_they_can_do(served):
    tiny, plain = served.http.get("/v1/models").json()["data"]
    assert tiny["drafts"] == plain["drafts"] == ["small", "ngram", "suffix", "none"]
    assert (tiny["has_chat_template"], plain["has_chat_template"]) == (True, False)


def test_a_recording_has_the_events(chat_lm):
    options = Options(max_new_tokens=6, num_beams=2, trace=True)
    result = specbeam.generate(chat_lm, "ab", options, raw=True)
    first, *rounds, last = events(chat_lm, [*b"ab"], options, None, result)
    assert first == begin(chat_lm, [*b"ab"], options, None)
    assert rounds == [{"event": "round", **one} for one in result.trace]
    assert last["sequences"][0]["token_ids"] == result.token_ids
