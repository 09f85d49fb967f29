"""On a real GPU: it computes what the CPU computes, and nothing that only saves time changes a bit."""

from itertools import product

import numpy as np
import pytest
import torch

import specbeam
from specbeam import Engine
from specbeam.cache.slots import Slots
from specbeam.core.tree import Tree
from tests.backends.test_conformance import FAMILIES, WITH_KERNELS, WITHOUT_KERNELS, evaluate
from tests.conftest import random_model
from tests.engine.test_ahead import BEAMS, KINDS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPT = [5, 6, 7, 5, 6, 7, 5]
DTYPES = ["float32", "bfloat16", "float16"]
DRAFTS = [None, "ngram", "suffix"]


@pytest.fixture(scope="module")
def pairs(save):
    """By family and dtype: a model on the CPU in float32, and on the GPU."""
    made = {}

    def pair(family, dtype="float32"):
        if family not in made:
            architecture, changes = FAMILIES[family]
            folder = save(random_model(architecture, **changes))
            made[family] = folder, specbeam.load(folder, backend="torch", device="cpu", dtype="float32")
        folder, on_cpu = made[family]
        if (family, dtype) not in made:
            made[family, dtype] = specbeam.load(folder, backend="torch", device="cuda", dtype=dtype)
            has_kernels = type(made[family, dtype].backend).__name__ == "GpuBackend"
            assert has_kernels == (FAMILIES[family][0] not in WITHOUT_KERNELS)
        return on_cpu, made[family, dtype]

    return pair


def texts(lm, prompt, **how):
    return [(one.token_ids, one.score) for one in specbeam.generate(lm, prompt, **how).sequences]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_logits_on_the_cpu(pairs, family, dtype):
    on_cpu, on_gpu = pairs(family, dtype)
    tokens = torch.randint(0, 256, (120,), generator=torch.Generator().manual_seed(1)).tolist()
    expected, got = (evaluate(Slots(Tree(tokens), lm.backend), np.arange(len(tokens))).cpu() for lm in (on_cpu, on_gpu))
    if dtype == "float32":
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)
    else:
        assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).median() > 0.95


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_equal_the_texts_on_the_cpu(pairs, family):
    on_cpu, on_gpu = pairs(family)
    for beams, draft in product((1, 4), DRAFTS):
        how = {"num_beams": beams, "num_return_sequences": beams, "max_new_tokens": 24, "draft": draft}
        expected, got = (specbeam.generate(lm, PROMPT, **how).sequences for lm in (on_cpu, on_gpu))
        assert [one.token_ids for one in got] == [one.token_ids for one in expected]
        assert [one.score for one in got] == pytest.approx([one.score for one in expected], abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", WITH_KERNELS)
def test_a_prompt_in_pieces_is_the_prompt_at_once(pairs, family, dtype):
    """Bit for bit, in passes of all the sizes that are captured, and in one that is not."""
    _, lm = pairs(family, dtype)
    tokens = torch.randint(0, 256, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    whole = evaluate(Slots(Tree(tokens), lm.backend), np.arange(len(tokens)))
    for size in (1, 3, 16, 33, 64, 100):
        slots, rows = Slots(Tree(tokens), lm.backend), []
        for start in range(0, len(tokens), size):
            nodes = np.arange(start, min(start + size, len(tokens)))
            rows.append(lm.backend.forward([slots.tree_batch(nodes, np.arange(len(nodes)))]))
        assert torch.equal(torch.cat(rows), whole), size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", WITH_KERNELS)
def test_drafts_and_other_requests_change_no_bit(pairs, family, dtype):
    _, lm = pairs(family, dtype)
    kinds = [{}, {"num_beams": 4}, {"num_beams": 12}, {"do_sample": True, "seed": 3}]
    for how in kinds:
        expected = texts(lm, PROMPT, max_new_tokens=40, bound_rule=False, **how) if "num_beams" in how else None
        found = [texts(lm, PROMPT, max_new_tokens=40, draft=draft, **how) for draft in DRAFTS]
        assert found == [expected or found[0]] * 3
    engine = Engine(lm)
    requests = [engine.submit(PROMPT[: 3 + i % 5], {"max_new_tokens": 20, **kinds[i % 4]}) for i in range(12)]
    engine.run()
    for i, request in enumerate(requests):
        together = [(one.token_ids, one.score) for one in request.result().sequences]
        assert together == texts(lm, PROMPT[: 3 + i % 5], max_new_tokens=20, **kinds[i % 4])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", KINDS + BEAMS)
def test_going_ahead_changes_no_bit(pairs, options, dtype):
    _, lm = pairs("llama", dtype)
    how = {"max_new_tokens": 70, **options}
    step_by_step = specbeam.generate(lm, PROMPT, **how, trace=True)
    assert texts(lm, PROMPT, **how) == [(one.token_ids, one.score) for one in step_by_step.sequences]


def test_a_model_without_finite_logits_is_refused(pairs, save):
    architecture, changes = FAMILIES["llama"]
    model = random_model(architecture, **changes)
    model.lm_head.weight.data *= 1e4
    model.model.norm.weight.data *= 1e38
    lm = specbeam.load(save(model), backend="torch", device="cuda", dtype="bfloat16")
    with pytest.raises(specbeam.SpecbeamError, match="hold"):
        specbeam.generate(lm, PROMPT, max_new_tokens=20)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1}, {"num_beams": 4}])
def test_a_stream_gives_the_same_tokens(pairs, options):
    _, lm = pairs("llama", "bfloat16")
    how = {"max_new_tokens": 100, "eos_token_id": [], **options}
    pieces = list(specbeam.stream(lm, PROMPT, **how))
    assert [token for piece in pieces for token in piece.token_ids] == specbeam.generate(lm, PROMPT, **how).token_ids
