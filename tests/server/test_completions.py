"""``/v1/completions``: the same texts, tokens and log-probabilities as without a server, whole and streamed."""

import numpy as np
import pytest
import torch

import specbeam
from tests.conftest import beams_of_transformers

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}


def whole(choice):
    """The content of a choice, for comparisons."""
    log_probs = choice.logprobs
    lists = [] if log_probs is None else [log_probs.tokens, log_probs.token_logprobs, log_probs.top_logprobs]
    offsets = [] if log_probs is None else log_probs.text_offset
    return choice.text, choice.model_extra.get("token_ids"), lists, offsets, choice.finish_reason, score(choice)


def score(choice):
    return choice.model_extra.get("score")


def joined(chunks):
    """The choices of a stream, each put together again, and the last chunk."""
    made = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text, ids, lists, offsets, end, score = whole(choice)
            before = made.setdefault(choice.index, ["", [], [[], [], []], [], None, None])
            assert end is None or not (text or ids or any(lists))  # the end has a frame of its own
            before[0] += text
            before[1] += ids or []
            before[2] = [a + b for a, b in zip(before[2], lists, strict=True)] if lists else before[2]
            before[3] += offsets
            assert before[4] is None  # nothing comes after the end
            before[4], before[5] = end, score
    return [tuple(made[index]) for index in sorted(made)], chunk


def log_probs_of_transformers(model, ids):
    """The log-probabilities after each token, [tokens, vocab]."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_greedy_text_and_log_probs_are_those_of_transformers(served, reference, chat_lm):
    given = served.client().completions.create(
        **GREEDY, prompt="One, two", logprobs=3, extra_body={"return_token_ids": True}
    )
    (choice,) = given.choices
    prompt = list(b"One, two")
    ids = choice.model_extra["token_ids"]
    expected = reference.generate(
        torch.tensor([chat_lm.tokenizer("One, two").input_ids]), max_new_tokens=12, do_sample=False
    )
    prompt = choice.model_extra["prompt_token_ids"]
    assert prompt + ids == expected[0].tolist()
    assert choice.text == chat_lm.tokenizer.decode(ids, skip_special_tokens=True)
    rows = log_probs_of_transformers(reference, prompt + ids)[len(prompt) - 1 : -1]
    np.testing.assert_allclose(choice.logprobs.token_logprobs, rows[range(len(ids)), ids], atol=1e-4)
    for row, top in zip(rows, choice.logprobs.top_logprobs, strict=True):
        np.testing.assert_allclose(list(top.values()), row.topk(3).values, atol=1e-4)
    assert (given.usage.prompt_tokens, given.usage.completion_tokens) == (len(prompt), len(ids))
    assert given.model_extra["specbeam"]["target_passes"] == len(ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"seed": 5, "temperature": 0.8, "top_p": 0.9, "extra_body": {"top_k": 20, "min_p": 0.01}},
        {"seed": 5, "n": 3},
        {"seed": 3, "temperature": 0.7, "extra_body": {"draft": "small"}},
        {"n": 3, "extra_body": {"num_beams": 4, "draft": "ngram"}},
        {"n": 2, "extra_body": {"use_beam_search": True, "length_penalty": 0.5, "draft": "small"}},
        {"temperature": 0, "extra_body": {"draft": "small", "num_draft_tokens": 3}},
        {"seed": 1, "stop": ["z", "Q"], "frequency_penalty": 0.7, "presence_penalty": 0.2},
        {"temperature": 0, "logit_bias": {"90": 8.0, "91": -100.0}, "extra_body": {"min_tokens": 4}},
        {"temperature": 0, "extra_body": {"ignore_eos": True, "draft": "suffix"}},
    ],
)
def test_streams_are_the_whole_answer_in_parts_with_and_without_a_draft(served, fields):
    fields, own = dict(fields), {"return_token_ids": True}
    own |= fields.pop("extra_body", {})
    request = {"model": "tiny", "prompt": ["abab abab", "Once"], "max_tokens": 10, "logprobs": 2, **fields}
    client = served.client()
    whole_answer = client.completions.create(**request, extra_body=own)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    parts, last = joined(client.completions.create(**request, extra_body=own, **stream))
    assert parts == [whole(choice) for choice in whole_answer.choices]
    assert last.usage.completion_tokens == whole_answer.usage.completion_tokens
    assert last.model_extra["specbeam"]["forward_passes"] > 0
    plain = {name: value for name, value in own.items() if name != "num_draft_tokens"} | {"draft": "none"}
    without = client.completions.create(**request, extra_body=plain)
    assert without.choices == whole_answer.choices
    assert without.model_extra["specbeam"]["drafted"] == 0


def test_a_default_draft_and_its_acceptance(start, chat_lm):
    with start({"tiny": chat_lm}, {"same": chat_lm}, "same") as server:
        drafted, plain = (
            server.post("/v1/completions", prompt="abc", max_tokens=16, temperature=0, **more).json()
            for more in ({"num_draft_tokens": 4}, {"draft": "none"})
        )
    assert drafted["choices"] == plain["choices"]
    assert drafted["specbeam"]["accepted"] > 0  # the model drafts its own tokens
    assert drafted["specbeam"]["target_passes"] < plain["specbeam"]["target_passes"] == 16
    assert plain["metrics"] is None
    made = drafted["metrics"]["speculative_decoding"]
    steps, accepted = made["num_spec_steps"], made["num_accepted_draft_tokens"]
    assert sum(made["acceptance_histogram"]) == steps
    assert sum(number * count for number, count in enumerate(made["acceptance_histogram"])) == accepted
    assert made["num_draft_tokens"] == drafted["specbeam"]["drafted"]
    assert made["mean_acceptance_length"] == 1 + accepted / steps
    assert made["num_spec_tokens"] == 4
    # A pass verifies draft tokens and adds one token of its own. The first one prefills the prompt.
    assert accepted + drafted["specbeam"]["target_passes"] == 16


def test_prompts_are_texts_or_token_ids_or_lists_of_either(served, chat_lm):
    client = served.client()
    texts = ["One", "Two, three"]
    ids = [chat_lm.tokenizer(text).input_ids for text in texts]
    expected = [one.text for one in specbeam.generate(chat_lm, ids, max_new_tokens=12)]
    for prompts in (texts, ids):
        together = client.completions.create(**GREEDY, prompt=prompts).choices
        assert [choice.text for choice in together] == expected
        assert [choice.index for choice in together] == [0, 1]
        for prompt, text in zip(prompts, expected, strict=True):
            assert client.completions.create(**GREEDY, prompt=prompt).choices[0].text == text


def test_several_samples_have_their_own_seeds(served, chat_lm):
    given = served.client().completions.create(model="tiny", prompt="abc", max_tokens=8, seed=11, n=3).choices
    expected = [
        specbeam.generate(chat_lm, "abc", raw=True, max_new_tokens=8, temperature=1.0, seed=11 + number).text
        for number in range(3)
    ]
    assert [choice.text for choice in given] == expected
    assert len({*expected}) == 3
    first, second = (served.post("/v1/completions", prompt="abc", seed=-7).json()["choices"] for _ in range(2))
    assert first == second


def test_best_of_returns_the_likeliest_per_token(served, chat_lm):
    given = served.client().completions.create(model="tiny", prompt="abc", max_tokens=6, seed=2, n=2, best_of=5)
    texts = [
        specbeam.generate(chat_lm, "abc", raw=True, max_new_tokens=6, temperature=1.0, seed=2 + number).sequences[0]
        for number in range(5)
    ]
    texts.sort(key=lambda text: text.log_prob / len(text.token_ids), reverse=True)
    assert [choice.text for choice in given.choices] == [text.text for text in texts[:2]]
    assert given.usage.completion_tokens == sum(len(text.token_ids) for text in texts)


def test_beams_are_those_of_transformers_best_first(served, reference, chat_lm):
    fields = {"max_tokens": 8, "n": 3, "logprobs": 0, "extra_body": {"num_beams": 4, "return_token_ids": True}}
    given = served.client().completions.create(model="tiny", prompt="A beam", **fields)
    prompt = given.choices[0].model_extra["prompt_token_ids"]
    texts, scores = beams_of_transformers(reference, prompt, num_beams=4, num_return_sequences=3, max_new_tokens=8)
    assert [choice.model_extra["token_ids"] for choice in given.choices] == texts
    np.testing.assert_allclose([score(choice) for choice in given.choices], scores, atol=1e-4)
    for choice in given.choices:
        total = sum(choice.logprobs.token_logprobs)
        assert score(choice) == pytest.approx(total / len(choice.logprobs.token_logprobs), abs=1e-5)


def test_beam_search_by_the_names_of_vllm(served):
    request = {"prompt": "A beam", "max_tokens": 6}
    own = served.post("/v1/completions", **request, num_beams=4, n=2).json()["choices"]
    assert served.post("/v1/completions", **request, use_beam_search=True, best_of=4, n=2).json()["choices"] == own
    wide = served.post("/v1/completions", **request, num_beams=4, n=4).json()["choices"]
    assert served.post("/v1/completions", **request, use_beam_search=True, n=4).json()["choices"] == wide


def test_everything_together_with_beams(served, chat_lm):
    both = {"num_beams": 3, "length_penalty": 0.0, "early_stopping": True, "repetition_penalty": 1.3}
    both |= {"presence_penalty": 0.5, "logit_bias": {68: 2}}
    theirs = {"max_tokens": 20, "n": 3, "stop": ["9", "b"], "draft": "small", "draft_width": 4, "logprobs": 1}
    given = served.post("/v1/completions", prompt="abc", **both, **theirs, return_token_ids=True).json()["choices"]
    ours = {"max_new_tokens": 20, "num_return_sequences": 3, "stop_strings": ["9", "b"]}
    expected = specbeam.generate(chat_lm, "abc", raw=True, **both, **ours).sequences
    assert [choice["text"] for choice in given] == [text.text for text in expected]
    assert [choice["token_ids"] for choice in given] == [text.token_ids for text in expected]
    assert [choice["score"] for choice in given] == [text.score for text in expected]
    assert [choice["logprobs"]["token_logprobs"] for choice in given] == [text.log_probs for text in expected]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(served, reference, stream, max_tokens):
    """As EleutherAI's harness asks for log-likelihoods."""
    prompt = list(range(40, 140))  # more than one part of a prompt
    given = served.client().completions.create(
        model="tiny",
        prompt=[prompt, prompt[:3]],
        max_tokens=max_tokens,
        temperature=0,
        echo=True,
        logprobs=2,
        stream=stream,
    )
    parts = joined(given)[0] if stream else [whole(choice) for choice in given.choices]
    for ids, (text, _, (tokens, log_probs, top), offsets, end, _) in zip((prompt, prompt[:3]), parts, strict=True):
        rows = log_probs_of_transformers(reference, ids)
        expected = rows[range(len(ids) - 1), ids[1:]]
        assert log_probs[0] is top[0] is None
        np.testing.assert_allclose(log_probs[1 : len(ids)], expected, atol=1e-4)
        for row, token, likeliest in zip(rows, ids[1:], top[1 : len(ids)], strict=False):
            best = {
                **dict(zip(row.topk(2).indices.tolist(), row.topk(2).values.tolist(), strict=True)),
                token: float(row[token]),
            }
            np.testing.assert_allclose(sorted(likeliest.values()), sorted(best.values()), atol=1e-4)
        assert len(tokens) == len(log_probs) == len(offsets) == len(ids) + max_tokens
        assert text.startswith("".join(tokens[:3]))
        assert offsets[:3] == [0, 1, 2]
        assert end == "length"


def test_echo_without_log_probs(served):
    choices = served.post("/v1/completions", prompt=["abc", "x"], max_tokens=0, echo=True).json()["choices"]
    assert [choice["text"] for choice in choices] == ["abc", "x"]
    choices = served.post("/v1/completions", prompt=["abc", "x"], max_tokens=0, echo=True, num_beams=3, n=2).json()[
        "choices"
    ]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "abc"), (1, "abc"), (2, "x"), (3, "x")]


def test_a_text_ends_before_a_stop_string_and_at_an_end_token(served, chat_lm):
    text = specbeam.generate(chat_lm, "abc", raw=True, max_new_tokens=12)
    stop = text.text[4]
    given = served.post("/v1/completions", prompt="abc", **GREEDY, stop=stop).json()["choices"][0]
    assert (given["text"], given["finish_reason"]) == (text.text[: text.text.index(stop)], "stop")
    given = served.post("/v1/completions", prompt="abc", **GREEDY, stop_token_ids=[text.token_ids[3]]).json()[
        "choices"
    ][0]
    assert given["finish_reason"] == "stop"
    assert given["text"] == specbeam.generate(chat_lm, "abc", raw=True, eos_token_id=text.token_ids[3]).text


def test_trace_has_the_rounds(served):
    given = served.post("/v1/completions", prompt="ab ab ab", **GREEDY, draft="ngram", trace=True).json()
    (trace,) = given["specbeam"]["trace"]
    assert len(trace) == given["specbeam"]["target_passes"]
