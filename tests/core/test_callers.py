"""Functions of the caller: arrays, tensors where they ask for these, and one line for the wrong kind."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

import specbeam
from specbeam.errors import SpecbeamError
from tests.conftest import needs_torch

PROMPT = [5, 6, 7]
OPTIONS = {"max_new_tokens": 6, "eos_token_id": []}
KINDS = (
    {},
    {"num_beams": 3},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"seed": 3, "top_p": 0.9},
)


@pytest.fixture(params=["cpu", "torch"])
def lm(request, tiny):
    _, lm = tiny("llama", initializer_range=0.2)
    return specbeam.load(lm.source, backend="cpu", quantize="float32") if request.param == "cpu" else lm


def of_arrays(ids, scores):
    """Works on arrays alone."""
    assert (type(ids), ids.dtype, ids.ndim) == (np.ndarray, np.int64, 2)
    assert (type(scores), scores.dtype, scores.ndim) == (np.ndarray, np.float32, 2)
    lower = scores.copy()
    lower[:, 1::2] -= 0.7
    return lower


def of_tensors(ids, scores):
    """The same function for tensors alone."""
    assert (ids.dtype, scores.dtype) == (torch.int64, torch.float32)
    odd = torch.arange(scores.shape[-1]) % 2 == 1
    return torch.where(odd, scores - 0.7, scores)


class OfTensors:
    def __call__(self, ids, scores):
        return of_tensors(ids, scores)

    def method(self, ids, scores):
        return of_tensors(ids, scores)


def texts(lm, options, function, option="logits_processor"):
    result = specbeam.generate(lm, PROMPT, **{**OPTIONS, **options, option: function})
    return [(sequence.token_ids, sequence.score) for sequence in result.sequences]


@needs_torch
@pytest.mark.parametrize("options", KINDS)
def test_arrays_and_tensors_give_one_text(lm, options):
    expected = texts(lm, options, of_arrays)
    bias = dict.fromkeys(range(1, lm.backend.vocab_size, 2), -0.7)
    assert [ids for ids, _ in texts(lm, options, bias, "logit_bias")] == [ids for ids, _ in expected]
    marked = [
        specbeam.tensors(lambda ids, scores: of_tensors(ids, scores)),
        specbeam.tensors(OfTensors)(),
        specbeam.tensors(OfTensors().method),
        lambda ids, scores: of_arrays(ids, scores).astype(np.float64),
        lambda ids, scores: torch.from_numpy(of_arrays(ids, scores)).double(),
    ]
    for function in marked:
        assert texts(lm, options, function) == expected


@pytest.mark.parametrize("options", KINDS)
def test_processors_of_transformers_get_tensors(lm, options):
    theirs = [RepetitionPenaltyLogitsProcessor(1.4), MinPLogitsWarper(0.02)]
    penalty = {"repetition_penalty": 1.4}
    expected = specbeam.generate(lm, PROMPT, **OPTIONS, **options, **penalty, logits_processor=theirs[1])
    assert texts(lm, options, theirs) == [(s.token_ids, s.score) for s in expected.sequences]


@needs_torch
def test_allowed_tokens_get_an_array_or_a_tensor(lm):
    def next_ones(_, ids):
        assert type(ids) is np.ndarray
        return np.array([int(ids[-1]) + 1, int(ids[-1]) + 2])

    @specbeam.tensors
    def of_tensors(_, ids):
        return torch.stack([ids[-1] + 1, ids[-1] + 2])

    found = [texts(lm, {"num_beams": 2}, one, "prefix_allowed_tokens_fn") for one in (next_ones, of_tensors)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("option", "function"),
    [
        ("logits_processor", lambda ids, scores: scores.masked_fill(scores < 0, -1.0)),
        ("logits_processor", lambda ids, scores: torch.softmax(scores, -1)),
        ("logits_processor", lambda ids, scores: scores.max(dim=-1)),
        ("prefix_allowed_tokens_fn", lambda _, ids: [ids[-1].item(), ids.cpu()[0]]),
    ],
)
def test_an_array_taken_for_a_tensor_is_one_line_that_names_the_mark(lm, option, function):
    with pytest.raises(SpecbeamError, match=rf"^{option} .*specbeam\.tensors\(function\)"):
        texts(lm, {}, function, option)


def test_an_error_of_a_function_stays_what_it_is(lm):
    for function in (lambda ids, scores: scores.nothing_else, lambda ids, scores: None.clone()):
        with pytest.raises((AttributeError, SpecbeamError)) as failed:
            texts(lm, {}, function)
        assert isinstance(failed.value, SpecbeamError) == ("ndarray" in str(failed.value))


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "NoneType"),
        ([1.0], "list"),
        (np.zeros((1, 3)), r"of shape \[1, 3\]"),
        (torch.zeros(3), r"of shape \[3\]"),
        (np.full((1, 259), None), "ndarray"),
        (np.full((1, 259), np.nan), "NaN"),
    ],
)
def test_scores_of_another_kind_are_refused(lm, returned, says):
    with pytest.raises(SpecbeamError, match=f"logits_processor .*{says}"):
        texts(lm, {}, lambda ids, scores: returned)


def test_the_engine_and_all_strategies_import_no_pytorch():
    modules = "api.generation", "api.scoring", "core.callers", "options.keywords", "structured", "cache.slots"
    modules += "decoding.beam_search", "decoding.speculative", "drafting.model", "backends.contract", "backends.devices"
    lines = [f"import specbeam.{name}" for name in modules]
    lines += ["from specbeam.backends import devices", "devices.choose_device('cpu'), devices.memory_for_caches('cpu')"]
    lines += ["import sys", "print(sorted({'torch', 'transformers', 'threadpoolctl'} & {*sys.modules}))"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout
