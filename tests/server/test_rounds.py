"""The rounds of the engine as server-sent events."""

import json

import pytest

import specbeam
from specbeam.models.sampling_defaults import FALLBACK

SIZES = {"num_draft_tokens": 3, "draft_width": 2, "draft_budget": 6}
BEAMS = {"num_beams": 4, "draft": "ngram", "temperature": 0, **SIZES}
DRAWN = {"temperature": 0.8, "seed": 3, "draft": "small", **SIZES}


def watched(served, path, **fields):
    response = served.post(path, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def without_times(rounds):
    same = {"pass": None, "event": None}
    return [one | same | {"drafted": [token | {"accepted": None} for token in one["drafted"]]} for one in rounds]


@pytest.mark.parametrize("fields", [BEAMS, {"temperature": 0}, DRAWN])
def test_the_events_are_the_trace_of_the_engine(served, chat_lm, draft_lm, fields):
    prompt = "ab ab ab"
    first, *rounds, last = watched(served, "/rounds/completions", prompt=prompt, max_tokens=24, logprobs=3, **fields)
    options = {"raw": True, "max_new_tokens": 24, "top_logprobs": 3, "trace": True, **FALLBACK.fill(fields)}
    if fields.get("draft") == "small":
        options["draft"] = draft_lm
    here = specbeam.generate(chat_lm, prompt, **options)
    assert [token["token_id"] for token in first["prompt"]] == chat_lm.tokenizer(prompt).input_ids
    assert "".join(token["text"] for token in first["prompt"]) == prompt
    assert without_times(rounds) == without_times(here.trace)
    assert [one["event"] for one in (first, *rounds, last)] == ["begin", *["round"] * len(rounds), "end"]
    for name in ("token_ids", "score"):
        assert [text[name] for text in last["sequences"]] == [getattr(text, name) for text in here.sequences]
    assert last["stats"]["target_passes"] == here.stats.target_passes


def test_the_text_is_that_of_the_openai_endpoint(served):
    fields = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, **BEAMS, "n": 2, "stop": "zz"}
    *_, last = watched(served, "/rounds/chat", **fields)
    choices = served.choices("/v1/chat/completions", **fields)
    assert [text["text"] for text in last["sequences"]] == [choice["message"]["content"] for choice in choices]
