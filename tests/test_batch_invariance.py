"""Batch invariance: on the ``cpu`` backend a request has the same bits alone and beside any others.

These are the promises that vLLM tests for its batch-invariant mode (tests/v1/determinism), with beams, lazy beams and
drafts added. docs/exactness.md says which of its tests is which of these.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import specbeam
from specbeam import Engine
from specbeam.api.scoring import score
from specbeam.engine import CostTable
from tests.conftest import head_of, in_thorough_mode, random_model, reference_model, run_alone
from tests.server.conftest import serving

THOROUGH = in_thorough_mode()
TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="ascii", errors="ignore")
"""Prompts are parts of it."""
METHODS = {
    "greedy": {},
    "sampled": {"temperature": 1.5, "top_p": 0.95, "seed": 7, "top_logprobs": 5},
    "4 beams": {"num_beams": 4, "num_return_sequences": 4, "top_logprobs": 5},
    "16 beams": {"num_beams": 16, "num_return_sequences": 3},  # lazy where a node costs much
    "drawn beams": {"num_beams": 4, "num_return_sequences": 4, "temperature": 1.5, "seed": 7},
}
DRAFTS = (None, "ngram", "suffix", "model")
TINY = {
    "llama, float32": ("llama", "float32", {"initializer_range": 0.1}),
    "gemma3, int8": ("gemma3", "int8", {"sliding_window": 9}),
    "gpt2, int4": ("gpt2", "int4", {}),
}
REAL = "smollm2-135m-instruct"
QUICK = {"llama, float32": tuple(METHODS), "gemma3, int8": ("greedy", "16 beams"), "gpt2, int4": ("sampled", "4 beams")}
"""The methods that quick mode asks of each model."""
FEW = {"llama, float32": ("sampled", "16 beams"), "gemma3, int8": ("greedy",), "gpt2, int4": ("4 beams",)}
"""The same, of each test whose question tests/engine/test_exactness.py asks too."""


def on_each_model(quick):
    """Parameters: all models and methods. ``quick`` has the methods of quick mode, by model."""

    def marks(model, method):
        of_model = [pytest.mark.models] if model == REAL else []
        return of_model + ([] if method in quick.get(model, ()) else [pytest.mark.thorough])

    pairs = [pytest.param(*pair, marks=marks(*pair)) for pair in product((*TINY, REAL), METHODS)]
    return pytest.mark.parametrize(("subject", "method"), pairs, indirect=["subject"])


class Subject:
    """A model, and how much is asked of it.

    Attributes:
        one, lm: the model with one thread, which answers requests alone, and with two threads.
        near: a draft model: the same weights in another precision.
        longest: characters of the longest prompt.
        batch: how many random requests there are.
        new_tokens: the length of a text.
    """

    def __init__(self, source, quantize, longest, batch, new_tokens):
        self.one, self.lm = (specbeam.load(source, backend="cpu", quantize=quantize, threads=n) for n in (1, 2))
        self.near = specbeam.load(source, backend="cpu", quantize="float32" if quantize == "int8" else "int8")
        self.longest, self.batch, self.new_tokens = longest, batch, new_tokens
        self.alone = cache(self._alone)

    def _alone(self, prompt, method):
        """The sequences of a request alone, without a draft and with all its beams."""
        plain = {"share_prefix": False} | ({"bound_rule": False} if "beams" in method else {})
        return run_alone(self.one, prompt, self.options(method) | plain).sequences

    def prompts(self, draw):
        """The tokens of random parts of a text."""
        parts = [(draw.randrange(len(TEXT)), draw.randint(1, self.longest)) for _ in range(self.batch)]
        return [tuple(self.lm.tokenizer((TEXT * 2)[start : start + length]).input_ids) for start, length in parts]

    def options(self, method):
        return {"max_new_tokens": self.new_tokens, "eos_token_id": [], **METHODS[method]}

    def engine(self, a_pass=1.0, a_node=0.0, **limits):
        """An engine that expects these seconds. A pass of the draft model takes a tenth of them."""

        def costs(backend, ahead=False):
            share = 0.1 if backend is self.near.backend else 1.0
            return CostTable(lambda nodes: share * a_pass * (1 + a_node * nodes))

        return Engine(self.lm, costs=costs, **limits)

    def ask(self, engine, asked, steps=0, after_step=lambda: None):
        """Check that requests have the bits that they have alone. Returns their statistics.

        Args:
            asked: of each request the prompt, the method and the draft.
            steps: the steps of the engine before the next request comes.
            after_step: called after each of the others.
        """
        requests = []
        for prompt, method, draft in asked:
            draft = self.near if draft == "model" else draft
            requests.append(engine.submit(prompt, self.options(method), draft=draft))
            for _ in range(steps):
                engine.step()
        while engine.step():
            after_step()
        for (prompt, method, _), request in zip(asked, requests, strict=True):
            assert bits(request.result().sequences) == bits(self.alone(prompt, method))
        return [request.result().stats for request in requests]


def bits(value):
    """A value with each bit of its numbers: Python writes as many digits as a number needs."""
    return repr(value)


def with_drafts(prompts, method):
    return [(prompt, method, draft) for prompt, draft in zip(prompts, DRAFTS * len(prompts), strict=False)]


@pytest.fixture(scope="module")
def subjects(save):
    @cache
    def subject(name):
        if name == REAL:
            return Subject(reference_model(REAL), "keep", *((600, 6, 24) if THOROUGH else (200, 2, 12)))
        architecture, quantize, changes = TINY[name]
        model = random_model(architecture, num_hidden_layers=2, **changes)
        if "initializer_range" in changes:
            head_of(model)[:] *= 40  # it repeats itself: lookups are accepted, and few beams matter
        return Subject(save(model), quantize, 40, 4, 12)

    return subject


@pytest.fixture
def subject(request, subjects):
    return subjects(request.param)


@on_each_model(QUICK | {REAL: ("4 beams",)})
def test_a_needle_among_random_requests(subject, method):
    """One request, once with each draft, at random places of random batches. The others do anything."""
    draw = random.Random(method)
    needle, stats = subject.prompts(draw)[0], []
    for a_node in (0.0, 1.0) * (2 if THOROUGH else 1):
        asked = [(prompt, draw.choice([*METHODS]), draw.choice(DRAFTS)) for prompt in subject.prompts(draw)]
        for one in with_drafts([needle] * len(DRAFTS), method):
            asked.insert(draw.randint(0, len(asked)), one)
        limits = {"max_requests": draw.randint(2, len(asked)), "max_batch_tokens": draw.choice((16, 512))}
        found = subject.ask(subject.engine(draw.choice((1e-6, 1.0)), a_node, **limits), asked)
        stats += [one for one, (prompt, *_) in zip(found, asked, strict=True) if prompt is needle]
    assert sum(one.accepted for one in stats) > 0
    if method == "16 beams" and subject.lm.backend.precision == "float32":
        assert min(one.evaluated_beams for one in stats) < 1


@on_each_model(FEW)
def test_limits_of_an_engine(subject, method):
    """Few requests are live at once, prompts are read in parts, or memory is short."""
    asked = with_drafts([prompt[:8] for prompt in subject.prompts(random.Random(method))], method)
    one_sequence = 8 + subject.new_tokens
    for limits in ({"max_requests": 3}, {"max_batch_tokens": 5}, {"max_cache_tokens": one_sequence}):
        subject.ask(subject.engine(1e-3, 0.1, **limits), asked)


@on_each_model(FEW)
def test_preempted_requests(subject, method):
    """After each step the newest request loses its cache. It goes on once another has ended."""
    engine, preempted = subject.engine(), []
    asked = with_drafts(subject.prompts(random.Random(method)), method)
    subject.ask(engine, asked, after_step=lambda: preempted.append(engine._scheduler.preempt_newest()))
    assert sum(preempted) >= len(asked)


@on_each_model(FEW)
def test_requests_that_come_while_others_generate(subject, method):
    """Their prompts, one of which is a single token, share passes with new tokens of the others."""
    prompts = subject.prompts(random.Random(method))
    asked = with_drafts([prompts[0], prompts[0][:1], *prompts[1:]], method)
    subject.ask(subject.engine(max_requests=len(asked)), asked, steps=2)


@on_each_model(FEW)
def test_cached_prefixes(subject, method):
    """Batches of several sizes. First the beginning of their prompts is cached, then all but the last token."""
    beginning, *ends = subject.prompts(random.Random(method))
    for size in range(1, len(ends) + 1) if THOROUGH else (len(ends),):
        asked = with_drafts([beginning + end for end in ends[:size]], method)
        engine = subject.engine(a_node=1.0)
        subject.ask(engine, [(beginning, method, None)])
        for _ in range(2):
            assert all(stats.reused_tokens >= len(beginning) - 1 for stats in subject.ask(engine, asked))


@on_each_model(QUICK)
def test_a_new_token_has_the_log_probabilities_of_a_prefill(subject, method):
    """The prompt and the new tokens before it are read as a prompt."""
    prompt = [*subject.prompts(random.Random(method))[0]]
    options = subject.options(method) | {"top_logprobs": 5}
    best = run_alone(subject.lm, prompt, options, subject.near).sequences[0]
    contexts = [prompt + best.token_ids[:place] for place in range(len(best.token_ids))]
    scores = score(subject.lm, [(context, [token]) for context, token in zip(contexts, best.token_ids, strict=True)])
    assert bits([log_prob for _, log_prob, _ in sorted(scores)]) == bits(best.log_probs)
    engine = Engine(subject.lm)
    one_token = {"max_new_tokens": 1, "top_logprobs": 5, "share_prefix": False}
    requests = [engine.submit(context, one_token) for context in contexts]
    engine.run()
    likeliest = [request.result().sequences[0].top_logprobs[0] for request in requests]
    assert bits(likeliest) == bits(best.top_logprobs)


@on_each_model({"llama, float32": ("greedy", "sampled", "16 beams")})
def test_clients_of_a_server(subject, method):
    """Prompts one by one, in one call, and from several clients at once. Then the whole texts as prompts."""
    neutral = {"top_p": 1.0, "repetition_penalty": 1.0}  # else the server samples by its defaults
    options = {
        "temperature": 0.0,
        **neutral,
        "num_beams": 1,
        "num_return_sequences": 1,
        **METHODS[method],
        "top_logprobs": 5,
    }
    options["n"], options["logprobs"] = options.pop("num_return_sequences"), options.pop("top_logprobs")
    prompts = [[*prompt] for prompt in subject.prompts(random.Random(method))]
    with serving({"model": subject.lm}, {"model": subject.near}) as server:

        def ask(prompt, draft, **how):
            fields = options | {"max_tokens": subject.new_tokens, "ignore_eos": True, "draft": draft or "none"} | how
            choices = server.choices(prompt=prompt, return_token_ids=True, **fields)
            return [(one["token_ids"], one["logprobs"]["token_logprobs"], one["logprobs"]) for one in choices]

        each = [ask(prompt, None) for prompt in prompts]
        for prompt, texts in zip(prompts, each, strict=True):
            expected = [(one.token_ids, one.log_probs) for one in subject.alone(tuple(prompt), method)]
            assert bits([text[:2] for text in texts]) == bits(expected)
        assert bits(ask(prompts, "model")) == bits([text for texts in each for text in texts])
        with ThreadPoolExecutor(len(prompts)) as clients:
            assert bits([*clients.map(ask, prompts, DRAFTS * len(prompts))]) == bits(each)
        for prompt, ((ids, log_probs, _), *_) in zip(prompts, each, strict=True):
            ((_, of_prompt, _),) = ask(prompt + ids, None, echo=True, max_tokens=0, num_beams=1, n=1)
            assert bits(of_prompt[len(prompt) :]) == bits(log_probs)


def test_a_pass_that_depends_on_its_batch_is_seen(subjects, monkeypatch):
    """The last bit of every second logit changes where requests share a pass."""
    subject = subjects("gemma3, int8")
    backend, prompts = subject.lm.backend, subject.prompts(random.Random(0))
    forward = backend.forward

    def worse(segments):
        logits = forward(segments)
        if len(segments) > 1:
            logits[:, ::2] = np.nextafter(logits[:, ::2], np.float32(np.inf))
        return logits

    monkeypatch.setattr(backend, "forward", worse)
    for method in ("sampled", "4 beams"):  # they do not go ahead in native code
        subject.ask(subject.engine(), [(prompts[0], method, None)])
        with pytest.raises(AssertionError):
            subject.ask(subject.engine(), [(prompt, method, None) for prompt in prompts])
