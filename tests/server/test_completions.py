"""``/v1/completions``: the same texts, tokens and log-probabilities as without a server, whole and streamed."""

import json

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

import specbeam
from specbeam.models.sampling_defaults import FALLBACK
from tests.conftest import UNUSED, beams_of_transformers, byte_tokenizer, random_model
from tests.prefix_spaces import prefix_space_tokenizer
from tests.server.conftest import given_costs

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def whole(choice):
    """The text, the token ids and the numbers of each token of a choice; and how it ended, and its score."""
    lists = [getattr(choice.logprobs, name, []) for name in LISTS]
    content = [choice.text, choice.model_extra.get("token_ids") or [], *lists]
    return content, (choice.finish_reason, choice.model_extra.get("score"))


def joined(chunks):
    """The choices of a stream, each put together again, and the last chunk."""
    made = {}
    for chunk in chunks:
        for choice in chunk.choices:
            content, end = whole(choice)
            before, last = made.get(choice.index, (["", [], [], [], [], []], (None, None)))
            assert last[0] is None  # nothing comes after the end
            assert end[0] is None or not any(content)  # the end has a frame of its own
            made[choice.index] = [a + b for a, b in zip(before, content, strict=True)], end
    return [made[index] for index in sorted(made)], chunk


def log_probs_of_transformers(model, ids):
    """The log-probabilities after each token, [tokens, vocab]."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_greedy_text_and_log_probs_are_those_of_transformers(served, reference, chat_lm):
    how = {"prompt": "One, two", "logprobs": 3, "extra_body": {"return_token_ids": True}}
    given = served.client().completions.create(**GREEDY, **how)
    (choice,) = given.choices
    prompt, ids = choice.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]
    given_ids = torch.tensor([chat_lm.tokenizer("One, two").input_ids])
    assert prompt + ids == reference.generate(given_ids, max_new_tokens=12, do_sample=False)[0].tolist()
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
    request = {"model": "tiny", "prompt": ["abab abab", "Once"], "max_tokens": 10, "logprobs": 2, **fields}
    own = {"return_token_ids": True, **request.pop("extra_body", {})}
    create = served.client().completions.create
    given = create(**request, extra_body=own)
    parts, last = joined(create(**request, extra_body=own, stream=True, stream_options={"include_usage": True}))
    assert parts == [whole(choice) for choice in given.choices]
    assert last.usage.completion_tokens == given.usage.completion_tokens
    assert last.model_extra["specbeam"]["forward_passes"] > 0
    own.pop("num_draft_tokens", None)
    without = create(**request, extra_body=own | {"draft": "none"})
    assert without.choices == given.choices
    assert without.model_extra["specbeam"]["drafted"] == 0


def test_a_default_draft_and_its_acceptance(start, chat_lm):
    with given_costs(), start({"tiny": chat_lm}, {"same": chat_lm}, "same") as server:
        request = {"prompt": "abc", "max_tokens": 16, "temperature": 0}
        drafted = server.post("/v1/completions", **request, num_draft_tokens=4).json()
        plain = server.post("/v1/completions", **request, draft="none").json()
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
    texts = ["One", "Two, three"]
    ids = [chat_lm.tokenizer(text).input_ids for text in texts]
    expected = [one.text for one in specbeam.generate(chat_lm, ids, max_new_tokens=12)]
    for prompts in (texts, ids):
        together = served.choices(**GREEDY, prompt=prompts)
        assert [(choice["index"], choice["text"]) for choice in together] == [*enumerate(expected)]
        assert [served.choices(**GREEDY, prompt=prompt)[0]["text"] for prompt in prompts] == expected


def test_several_samples_have_their_own_seeds(served, chat_lm):
    expected = [text.text for text in drawn(chat_lm, 3)]
    assert [choice["text"] for choice in served.choices(prompt="abc", max_tokens=6, seed=2, n=3)] == expected
    assert len({*expected}) == 3
    assert served.choices(prompt="abc", seed=-7) == served.choices(prompt="abc", seed=-7)


def drawn(lm, number):
    """Samples of the library, with the seeds of the server for seed 2."""
    how = {"raw": True, "max_new_tokens": 6, **FALLBACK.settings}
    return [specbeam.generate(lm, "abc", **how, seed=2 + sample).sequences[0] for sample in range(number)]


def test_best_of_returns_the_likeliest_per_token(served, chat_lm):
    given = served.client().completions.create(model="tiny", prompt="abc", max_tokens=6, seed=2, n=2, best_of=5)
    texts = sorted(drawn(chat_lm, 5), key=lambda text: text.log_prob / len(text.token_ids), reverse=True)
    assert [choice.text for choice in given.choices] == [text.text for text in texts[:2]]
    assert given.usage.completion_tokens == sum(len(text.token_ids) for text in texts)


def test_beams_are_those_of_transformers_best_first(served, reference):
    fields = {"max_tokens": 8, "n": 3, "logprobs": 0, "extra_body": {"num_beams": 4, "return_token_ids": True}}
    given = served.client().completions.create(model="tiny", prompt="A beam", **fields)
    prompt = given.choices[0].model_extra["prompt_token_ids"]
    texts, scores = beams_of_transformers(reference, prompt, num_beams=4, num_return_sequences=3, max_new_tokens=8)
    assert [choice.model_extra["token_ids"] for choice in given.choices] == texts
    own = [choice.model_extra["score"] for choice in given.choices]
    np.testing.assert_allclose(own, scores, atol=1e-4)
    np.testing.assert_allclose(own, [np.mean(choice.logprobs.token_logprobs) for choice in given.choices], atol=1e-5)


def test_beam_search_by_the_names_of_vllm(served):
    request = {"prompt": "A beam", "max_tokens": 6}
    for theirs, n in (({"best_of": 4}, 2), ({}, 4)):
        own = served.choices(**request, num_beams=4, n=n)
        assert served.choices(**request, use_beam_search=True, **theirs, n=n) == own


def test_everything_together_with_beams(served, chat_lm):
    both = {"num_beams": 3, "length_penalty": 0.0, "early_stopping": True, "repetition_penalty": 1.3}
    both |= {"presence_penalty": 0.5, "logit_bias": {68: 2}}
    theirs = {"max_tokens": 20, "n": 3, "stop": ["9", "b"], "draft": "small", "draft_width": 4, "logprobs": 1}
    given = served.choices(prompt="abc", **both, **theirs, return_token_ids=True)
    ours = {"max_new_tokens": 20, "num_return_sequences": 3, "stop_strings": ["9", "b"]}
    expected = specbeam.generate(chat_lm, "abc", raw=True, **both, **ours).sequences
    for name in ("text", "token_ids", "score"):
        assert [choice[name] for choice in given] == [getattr(text, name) for text in expected]
    assert [choice["logprobs"]["token_logprobs"] for choice in given] == [text.log_probs for text in expected]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(served, reference, stream, max_tokens):
    """As EleutherAI's harness asks for log-likelihoods."""
    prompt = list(range(40, 140))  # more than one part of a prompt
    how = {"max_tokens": max_tokens, "temperature": 0, "echo": True, "logprobs": 2, "stream": stream}
    given = served.client().completions.create(model="tiny", prompt=[prompt, prompt[:3]], **how)
    parts = joined(given)[0] if stream else [whole(choice) for choice in given.choices]
    for ids, ((text, _, tokens, log_probs, top, offsets), (end, _)) in zip((prompt, prompt[:3]), parts, strict=True):
        rows = log_probs_of_transformers(reference, ids)
        assert log_probs[0] is top[0] is None
        np.testing.assert_allclose(log_probs[1 : len(ids)], rows[range(len(ids) - 1), ids[1:]], atol=1e-4)
        for row, token, likeliest in zip(rows, ids[1:], top[1 : len(ids)], strict=False):
            best = row[[*{*row.topk(2).indices.tolist(), token}]]
            np.testing.assert_allclose(sorted(likeliest.values()), sorted(best.tolist()), atol=1e-4)
        assert len(tokens) == len(log_probs) == len(offsets) == len(ids) + max_tokens
        assert text.startswith("".join(tokens[:3]))
        assert offsets[:3] == [0, 1, 2]
        assert end == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_only_scored_may_fill_the_context(served, reference, stream):
    prompt = [n % 250 for n in range(256)]
    how = {"echo": True, "logprobs": 0, "stream": stream}
    given = served.client().completions.create(model="tiny", prompt=prompt, max_tokens=0, **how)
    log_probs = (joined(given)[0] if stream else [whole(choice) for choice in given.choices])[0][0][3]
    rows = log_probs_of_transformers(reference, prompt)
    np.testing.assert_allclose(log_probs[1:], rows[range(255), prompt[1:]], atol=1e-4)
    holds = "the model's context holds 256"
    for tokens, new, says in (
        (256, 1, f"has 256 tokens, but {holds}, which must hold"),
        (257, 0, f"257 tokens, but {holds}: "),
    ):
        error = served.refused("/v1/completions", prompt=[5] * tokens, max_tokens=new, echo=True, logprobs=0)
        assert says in error["message"]
        assert error["code"] == "context_length_exceeded"
    (choice,) = served.choices(prompt=prompt[:255], max_tokens=1, ignore_eos=True)
    assert choice["finish_reason"] == "length"


def test_echo_without_log_probs(served):
    for how, texts in (({}, ["abc", "x"]), ({"num_beams": 3, "n": 2}, ["abc", "abc", "x", "x"])):
        choices = served.choices(prompt=["abc", "x"], max_tokens=0, echo=True, **how)
        assert [(choice["index"], choice["text"]) for choice in choices] == [*enumerate(texts)]


def test_a_text_ends_before_a_stop_string_and_at_an_end_token(served, chat_lm):
    text = specbeam.generate(chat_lm, "abc", raw=True, max_new_tokens=12)
    stop, end = text.text[4], text.token_ids[3]
    ended = specbeam.generate(chat_lm, "abc", raw=True, eos_token_id=end).text
    for how, expected in (({"stop": stop}, text.text.partition(stop)[0]), ({"stop_token_ids": [end]}, ended)):
        (given,) = served.choices(prompt="abc", **GREEDY, **how)
        assert (given["text"], given["finish_reason"]) == (expected, "stop")


def test_trace_has_the_rounds(served):
    given = served.post("/v1/completions", prompt="ab ab ab", **GREEDY, draft="ngram", trace=True).json()
    (trace,) = given["specbeam"]["trace"]
    assert len(trace) == given["specbeam"]["target_passes"]


def test_stop_strings_end_a_text_at_special_tokens_and_after_min_tokens(served):
    """The bias makes each token the special one, which the text does not show."""
    how = {"prompt": "abc", **GREEDY, "logit_bias": {str(UNUSED): 100}, "return_token_ids": True}
    for stop, min_tokens, tokens in (("<unused>", 0, 1), (["never", "<unused><unused>"], 0, 2), ("<unused>", 5, 6)):
        (given,) = served.choices(**how, stop=stop, min_tokens=min_tokens)
        assert (given["token_ids"], given["text"], given["finish_reason"]) == ([UNUSED] * tokens, "", "stop")


@pytest.fixture(scope="module")
def spaced(start, save):
    """A server whose tokenizer puts a space before each text, as Llama 2's, and the tokenizer."""
    tokenizer = prefix_space_tokenizer("prepended")
    model = random_model("llama", vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2, pad_token_id=0)
    with start({"tiny": specbeam.load(save(model, tokenizer), backend="cpu", dtype="float32")}) as server:
        yield server, tokenizer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["The is", "The<turn>is", [1, 277, 278], [1]])
def test_texts_and_offsets_after_a_prompt(spaced, prompt, stream):
    """The choice is " Paris" after the prompt; " Paris" as a first word is shown without its space."""
    served, tokenizer = spaced
    how = {"model": "tiny", "prompt": prompt, "temperature": 0, "logprobs": 0, "stream": stream, "max_tokens": 1}
    how["extra_body"] = {"structured_outputs": {"choice": [" Paris"]}}
    before = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)
    for echo in (False, True):
        given = served.client().completions.create(**how, echo=echo)
        text, _, tokens, _, top, offsets = joined(given)[0][0][0] if stream else whole(given.choices[0])[0]
        expected = "Paris" if prompt == [1] else " Paris"
        assert text == (before if echo else "") + expected
        assert [*top[-1]] == tokens[-1:] == [expected]
        for token, offset in zip(tokens, offsets, strict=True):
            assert token == "<s>" or text[offset : offset + len(token)] == token
        assert offsets[-1] == len(text) - len(expected)


MARKS = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "mistral": ("[PREFIX]", "[SUFFIX]"),
}


def test_a_suffix_is_filled_in_before(served, save, start):
    lms = {}
    for name, marks in MARKS.items():
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
        lms[name] = specbeam.load(save(random_model("llama", vocab_size=259 + len(marks)), tokenizer), backend="cpu")
    how = {"max_tokens": 9, "temperature": 0}
    with start(lms) as server:
        for name, marks in MARKS.items():
            ids = {mark: server.tokens(model=name, prompt=mark) for mark in marks}
            assert {len(one) for one in ids.values()} == {1}
            before, after = (server.tokens(model=name, prompt=text, add_special_tokens=False) for text in ("ab", "yz"))
            if name == "mistral":
                prompt = [*ids[marks[1]], *after, *ids[marks[0]], *before]
            else:
                prompt = [*ids[marks[0]], *before, *ids[marks[1]], *after, *ids[marks[2]]]
            asked = {"model": name, "prompt": "ab", "suffix": "yz", "return_token_ids": True, **how}
            (filled,) = server.choices(**asked)
            assert filled["prompt_token_ids"] == prompt
            (expected,) = server.choices(model=name, prompt=prompt, **how)
            assert filled["text"] == expected["text"]
            assert (
                server.choices(**asked | {"prompt": ["ab", ""], "n": 2, "num_beams": 2})[0]["prompt_token_ids"]
                == prompt
            )
            lines = server.post(
                "/api/generate", model=name, prompt="ab", suffix="yz", options={**how, "num_predict": 9}
            )
            assert "".join(json.loads(line)["response"] for line in lines.text.splitlines()) == filled["text"]
            assert server.refused("/v1/completions", **asked, echo=True)["param"] == "suffix"
            assert server.refused("/v1/completions", **asked | {"prompt": [5]})["param"] == "suffix"
            error = server.refused("/v1/completions", **asked | {"suffix": "y" * 300})
            assert error["code"] == "context_length_exceeded"
    error = served.refused("/v1/completions", prompt="ab", suffix="yz")
    assert error["param"] == "suffix"
    assert "the vocabulary of tiny has no tokens to fill in the middle" in error["message"]
    assert served.choices(prompt="ab", suffix="", **how) == served.choices(prompt="ab", **how)
