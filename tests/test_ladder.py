"""The five rungs give the text of transformers, and a rung that fails says why."""

import pytest
import torch

import specbeam
from specbeam import hf, ladder
from specbeam.backends.torch.transformer import Transformer
from tests.backends.test_conformance import FAMILIES
from tests.backends.test_encoder_decoder import make
from tests.conftest import EOS, beams_of_transformers, random_model
from tests.core.test_selection import needs_compiler

PROMPT = [5, 6, 7, 5, 6, 7, 5]
TOKENS = 8


@pytest.fixture(scope="session")
def lm(tiny):
    return tiny("llama", backend="torch")[1]


@pytest.fixture
def interpreted(monkeypatch):
    """Replaces the compiler: passes run uncompiled. Returns the arguments of each call."""
    calls = []
    monkeypatch.setattr(torch, "compile", lambda forward, **how: (calls.append(how), forward)[1])
    return calls


def expected(model, prompt=PROMPT, tokens=TOKENS):
    (found,), _ = beams_of_transformers(model, prompt, max_new_tokens=tokens)
    return tuple(found)


def climb(lm, tokens=TOKENS, prompt=PROMPT, runs=1, **how):
    return [*ladder.climb(lm, prompt, max_new_tokens=tokens, runs=runs, **how)]


def failures(found):
    return {rung.number: rung.failure for rung in found}


@pytest.mark.parametrize(
    "family",
    [
        # Rungs differ in positions and in sliding windows. The rest of a family is the transformer's own affair.
        *("llama", "gpt2", "gemma3", "mistral, sliding window"),
        *(pytest.param(f, marks=pytest.mark.thorough) for f in ("gemma2", "gpt_neox", "phi3", "smollm3", "qwen3")),
    ],
)
def test_every_rung_gives_the_text_of_transformers(tiny, interpreted, family):
    architecture, changes = FAMILIES[family]
    theirs, lm = tiny(architecture, backend="torch", **changes)
    found = climb(lm, runs=2)
    assert [*failures(found).items()] == [(number, None) for number in ladder.RUNGS]
    for rung in found:
        assert (rung.token_ids, rung.text) == (expected(theirs), lm.decode([*rung.token_ids]))
        assert rung.passes == len(rung.token_ids)
        assert len(rung.seconds) == 2
        assert min(rung.seconds) <= rung.median <= max(rung.seconds)
        assert rung.tokens_per_second == pytest.approx(len(rung.token_ids) / rung.median)
        assert rung.identical is (None if rung.number == 1 else True)
        assert (rung.compile_seconds is None) == (rung.number not in ladder.COMPILED)
    assert interpreted == [{"fullgraph": True, "dynamic": False, "mode": None}] * 2


@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "sdpa"), ("gemma3", "sdpa"), ("gpt2", "sdpa"), ("gemma3", "eager")]
)
def test_models_of_transformers_are_not_compiled(family, attention):
    architecture, changes = FAMILIES[family]
    model = random_model(architecture, attention=attention, **changes)
    found = climb(hf.wrap(model))
    failure = "the model runs on the transformers backend, and only torch's passes are compiled"
    assert failures(found) == {1: None, 2: failure, 3: None, 4: failure, 5: None}
    assert {rung.token_ids for rung in found if not rung.failure} == {expected(model)}


@pytest.mark.parametrize("quantize", ["float32", "int8"])
def test_native_kernels_climb_what_is_not_compiled(save, quantize):
    model = random_model("gemma3", sliding_window=5)
    found = climb(specbeam.load(save(model), backend="cpu", quantize=quantize))
    assert [rung.failure is None for rung in found] == [True, False, True, False, True]
    assert [rung.identical for rung in found] == [None, None, True, None, True]
    assert {(rung.device, rung.backend, rung.weights) for rung in found} == {("cpu", "cpu", quantize)}
    if quantize == "float32":
        assert found[0].token_ids == expected(model)


def test_models_with_an_encoder_are_for_the_engine_alone():
    found = climb(hf.wrap(make("t5")), 4, [10, 11, EOS])
    failure = "the model has an encoder, which this rung does not know"
    assert failures(found) == {1: failure, 2: failure, 3: failure, 4: failure, 5: None}
    assert found[-1].identical is None


def test_texts_end_at_an_end_token_and_with_the_context(tiny, interpreted):
    model, lm = tiny("llama", backend="torch")
    (first,) = climb(lm, rungs=[1])
    stop = first.token_ids[5]
    ends = specbeam.LanguageModel(lm.source, lm.backend, lm.tokenizer, frozenset([stop]), {"repetition_penalty": 9.0})
    for rung in climb(ends):
        assert rung.token_ids == first.token_ids[: first.token_ids.index(stop) + 1]
    long = [i % 250 for i in range(lm.backend.context_length - 3)]
    for rung in climb(lm, prompt=long):
        assert (rung.failure, rung.token_ids) == (None, expected(model, long, 3))


def test_half_precision_says_where_texts_part(save, interpreted):
    for rung in climb(specbeam.load(save(random_model("llama")), device="cpu", dtype="bfloat16")):
        assert (rung.failure, rung.weights) == (None, "bfloat16")
        assert rung.identical in (None, True) or rung.difference.near_tie


def test_a_difference_is_measured(lm, interpreted, monkeypatch):
    (plain,) = climb(lm, 4, rungs=[1])
    second = {"gap": 0.0, "token": plain.token_ids[2]}

    def wrong(model, reader, *rest):
        yield from plain.token_ids[:2]
        yield second["token"]

    def difference():
        _, rung = climb(lm, 4, rungs=[1, 3])
        assert rung.identical is False
        return rung.difference

    monkeypatch.setattr(ladder, "kv_cache", wrong)
    ended = difference()
    assert (ended.token, ended.gap, ended.near_tie) == (3, None, False)

    text = [*PROMPT, *plain.token_ids[:2]]
    logits = ladder.Model(lm).logits(text, 0, ladder.NoCache(), len(text))[0]
    second["token"] = int(logits.topk(2).indices[1])
    apart = difference()
    assert (apart.token, apart.near_tie) == (2, False)
    assert apart.gap == pytest.approx(float(logits.topk(2).values.diff().abs()), abs=1e-4)
    other = [*plain.token_ids[:2], second["token"]]
    assert not ladder.part(lm, PROMPT, other, plain.token_ids).near_tie  # whichever came first
    monkeypatch.setitem(ladder.NEAR_TIE, "float32", 1e9)
    assert difference().near_tie


def test_a_rung_that_fails_says_why_and_the_others_go_on(lm, monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("no compiler here\nand much more")

    monkeypatch.setattr(torch, "compile", failing)
    found = climb(lm, 2, rungs=[2, 3, 4, 5])
    failure = "RuntimeError: no compiler here"
    assert failures(found) == {2: failure, 3: None, 4: failure, 5: None}
    assert [rung.identical for rung in found] == [None, None, None, True]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (NotImplementedError("'aten::x' is not implemented for MPS"), "NotImplementedError: 'aten::x' is not"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_reasons_are_short(lm, monkeypatch, error, says):
    def forward(*_):
        raise error

    monkeypatch.setattr(Transformer, "forward", forward)
    (rung,) = climb(lm, 2, rungs=[3])
    assert rung.failure.startswith(says)


def test_compiled_rungs_are_one_program_each(lm, monkeypatch):
    """Dynamo traces a pass as one graph without breaks, once: the shapes never change. The graph runs uncompiled."""
    compile_, graphs = torch.compile, []

    def trace_only(forward, fullgraph, dynamic, mode):
        def keep(graph, inputs):
            graphs.append(graph)
            return graph.forward

        return compile_(forward, fullgraph=fullgraph, dynamic=dynamic, backend=keep)

    monkeypatch.setattr(torch, "compile", trace_only)
    for rung in ladder.climb(lm, PROMPT, max_new_tokens=6, rungs=[1, 2, 4], runs=2):  # one rung after the other
        assert rung.failure is None
        assert rung.identical in (None, True)
        assert len(graphs) == {1: 0, 2: 1, 4: 2}[rung.number]


@pytest.mark.thorough
@needs_compiler
def test_compiled_rungs_are_compiled(lm):
    for rung in climb(lm, 6, rungs=[1, 2, 4]):
        assert rung.failure is None
        assert rung.identical in (None, True)
        assert (rung.compile_seconds is not None) == (rung.number in ladder.COMPILED)
