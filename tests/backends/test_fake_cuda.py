"""The code for GPUs, on a CUDA device that is not there: where tensors lie, their dtypes, and when the host waits."""

from itertools import product

import numpy as np
import pytest
import torch

import specbeam
from specbeam import hf, ladder
from specbeam.backends import devices
from specbeam.backends.torch import TorchBackend
from specbeam.backends.torch.cache import Kept, KeyValues
from specbeam.backends.torch.sampling import choose
from specbeam.backends.transformers import CausalBackend
from specbeam.cache.slots import Slots
from specbeam.core.selection import Edit, Noise, SelectionRequest
from specbeam.core.tree import Tree
from specbeam.engine import CostTable
from tests.backends.test_conformance import FAMILIES, evaluate
from tests.calls import warpers
from tests.conftest import random_model, run_alone
from tests.core.test_selection import assert_equal_bits
from tests.fake_cuda import fake_cuda, twin

CUDA = "cuda:0"
PROMPT = [5, 6, 7, 5, 6, 7, 5]


@pytest.fixture
def gpu(monkeypatch):
    def read_here(pieces, _):  # modes of PyTorch hold in one thread
        for _, read in pieces:
            read()

    with fake_cuda() as gpu:
        monkeypatch.setattr("specbeam.backends.torch.read_all", read_here)
        monkeypatch.setattr("specbeam.models.model._torch_backend", TorchBackend)  # kernels need a real device
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 2 * 10**9))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 10**8)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10**8)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4 * 10**8)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.waits.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        yield gpu


@pytest.fixture(scope="session")
def folder(save):
    return save(random_model("llama", num_hidden_layers=1))


def load(folder, device, dtype="float32"):
    return specbeam.load(folder, backend="torch", device=device, dtype=dtype)


@pytest.fixture
def waits(gpu, monkeypatch):
    """Does work on the CPU and on the GPU, with equal results. Returns the waits from each pass on to the next one."""

    def waits(work, backend=TorchBackend):
        starts, forward = [], backend.forward

        def noted(self, segments):
            if self.device == CUDA:
                starts.append(len(gpu.waits))
            return forward(self, segments)

        monkeypatch.setattr(backend, "forward", noted)
        assert work("cpu") == work(CUDA)
        return np.diff([*starts, len(gpu.waits)]).tolist()

    return waits


@specbeam.tensors
def forbid_even(input_ids, scores):
    assert input_ids.device == scores.device
    return scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) % 2 == 0, -torch.inf)


OUT_OF_ORDER = 3
"""The rows of a step come in another order than the strategy wants: to time the pass, to see whether they are finite,
and to choose."""
CASES = {
    "greedy": ({}, [1] * 3),
    "beams": ({"num_beams": 4}, [OUT_OF_ORDER, 1, 1]),
    "groups of beams": ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, [OUT_OF_ORDER, 1, 1]),
    "penalties": ({"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "logit_bias": {9: 2.0}}, [1] * 3),
    "a constraint": (
        {"constraint": specbeam.TokenTrie([[*one] for one in product((8, 9), (9, 12), (10, 13))])},
        [1] * 3,
    ),
    "forced tokens": ({"constraint": specbeam.TokenTrie([[8, 9, 10, 11]])}, [1]),
    "a function of the caller": ({"logits_processor": [forbid_even]}, [4] * 3),
    "alternatives": ({"top_logprobs": 3}, [1] * 3),
    "lookups": ({"draft": "ngram"}, [1] * 3),
}
DRAFTED = {"greedy": {}, "draws": {"do_sample": True, "top_p": 0.9, "seed": 3}, "beams": {"num_beams": 3}}


@pytest.mark.parametrize("case", CASES)
def test_a_pass_is_waited_for_once(waits, folder, case):
    """Tokens equal the tokens of the CPU."""
    options, expected = CASES[case]
    how = {"max_new_tokens": 3, **options}
    assert waits(lambda device: specbeam.generate(load(folder, device), PROMPT, **how).token_ids) == expected


@pytest.mark.parametrize("case", DRAFTED)
def test_a_pass_of_a_draft_is_waited_for_once(waits, folder, case):
    """Each level of a draft waits for its selection. So a round has as many waits as passes."""

    def work(device):
        nonlocal stats
        lm, draft = load(folder, device), load(folder, device)
        seconds = {lm.backend: 1.0, draft.backend: 0.01}
        costs = {"costs": lambda backend, ahead=False: CostTable(lambda _: seconds[backend])}
        result = run_alone(lm, PROMPT, {"max_new_tokens": 5} | DRAFTED[case], draft, **costs)
        stats = result.stats
        return result.token_ids

    stats = None
    found = waits(work)
    assert stats.draft_passes > stats.target_passes
    assert stats.accepted
    assert found == [1] * (stats.draft_passes + stats.target_passes)


def test_a_piece_of_a_prompt_is_waited_for_once(gpu, waits, folder):
    """Its time is measured."""

    def work(device):
        lm = load(folder, device)
        gpu.waits.clear()
        return run_alone(lm, PROMPT, {"max_new_tokens": 2}, max_batch_tokens=3).token_ids

    assert waits(work) == [1] * 4
    assert gpu.waits[:2] == ["synchronize"] * 2


def test_requests_of_many_kinds_are_waited_for_once(waits, folder):
    def work(device):
        engine = specbeam.Engine(load(folder, device))
        kinds = {}, {"do_sample": True, "seed": 1}, {"repetition_penalty": 1.2}, {}, {"top_logprobs": 2}
        requests = [engine.submit(PROMPT[:n], {"max_new_tokens": 2} | kind) for n, kind in enumerate(kinds, 3)]
        engine.run()
        return [request.result().token_ids for request in requests]

    assert waits(work) == [1] * 2


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2"])
def test_a_pass_lies_on_the_device_in_its_dtype(gpu, save, family):
    """Also where a tree has several sequences, where the KV cache grows, and where slots are gathered."""
    architecture, changes = FAMILIES[family]
    lm = load(save(random_model(architecture, **{"num_hidden_layers": 2} | changes)), CUDA, dtype="auto")
    backend, tree = lm.backend, Tree([1, 2, 3])
    backend.reserve(10)
    slots = Slots(tree, backend)
    gpu.waits.clear()
    first = evaluate(slots, [tree.tip])
    left, right = tree.add([2, 2], [4, 5]).tolist()
    second = evaluate(slots, [left, right, *tree.add([right, left], [6, 7]).tolist()])
    store = twin(backend._store.tensors(0)[0])[:, :7].clone()
    backend.reserve(1000)
    assert torch.equal(twin(backend._store.tensors(0)[0])[:, :7], store)
    nothing = backend.forward([slots.tree_batch(np.array([1, 2]), np.array([], dtype=np.int64))])
    few = backend.forward([slots.tree_batch(np.array([1, 2]), np.array([1]), vocab=17)])
    assert gpu.waits == []
    assert backend.precision == "bfloat16"
    rows = first, second, nothing, few
    assert [logits.shape for logits in rows] == [(1, 259), (4, 259), (0, 259), (1, 17)]
    assert {(logits.dtype, str(logits.device)) for logits in rows} == {(torch.float32, CUDA)}
    weights = [*backend.model.parameters(), *backend._store.tensors(0), *backend._store.tensors(1)]
    assert {(tensor.dtype, str(tensor.device)) for tensor in weights} == {(torch.bfloat16, CUDA)}
    assert {str(frequencies.device) for frequencies in backend.model.frequencies.values()} <= {CUDA}


def ids(n):
    return np.arange(n, dtype=np.uint32)


def edit(kind, vocab):
    values = np.full(0 if kind == "ban" else 2, 1.3, np.float32)
    return Edit(kind, np.zeros(2, np.int32), np.array([1, vocab], np.int32), values)


KINDS = {
    "the highest": lambda n, vocab: SelectionRequest(),
    "beams": lambda n, vocab: SelectionRequest(top=6, normalize=True),
    "none": lambda n, vocab: SelectionRequest(top=0),
    "draws": lambda n, vocab: SelectionRequest(top=2, noise=Noise(2**64 - 1, ids(n), ids(n))),
    "edits": lambda n, vocab: SelectionRequest(edits=tuple(edit(kind, vocab) for kind in ("repeat", "add", "ban"))),
    "a mask": lambda n, vocab: SelectionRequest(
        allowed=np.full((n, -(-vocab // 8)), 85, np.uint8), one_of=(0, 2), together=(vocab // 2, vocab)
    ),
    "warpers": lambda n, vocab: SelectionRequest(
        warpers=warpers(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, typical_p=0.9)
    ),
    "given": lambda n, vocab: SelectionRequest(given=np.full((n, 2), 3), total=True),
    "few": lambda n, vocab: SelectionRequest(top=3, vocab=33),
}


@pytest.mark.parametrize("vocab", [100, 3100])
def test_all_selections_come_in_one_copy(gpu, vocab):
    """Each kind, and two of a kind together: side by side or not. Selections are arrays, as on the CPU."""
    requests = [(slice(2 * i, 2 * i + 2), kind(2, vocab)) for i, kind in enumerate([*KINDS.values()] * 2)]
    requests += [(slice(stop, stop + 1), KINDS["draws"](1, vocab)) for stop in (36, 37)]
    on_cpu = torch.randn(38, vocab, generator=torch.Generator().manual_seed(1)) * 3
    logits = on_cpu.to(CUDA)
    gpu.waits.clear()
    with torch.inference_mode():
        selections = choose(logits, requests)
    assert len(gpu.waits) == 1
    for selection, expected in zip(selections, choose(on_cpu, requests), strict=True):
        assert str(selection.logits.device) == CUDA
        assert torch.equal(twin(selection.logits), expected.logits)
        assert_equal_bits(selection, expected)


def test_models_of_transformers_are_waited_for_once(waits):
    model, how = random_model("mistral", sliding_window=5, num_hidden_layers=2), {"num_beams": 2, "max_new_tokens": 3}
    found = waits(lambda on: specbeam.generate(hf.wrap(model.to(on)), PROMPT, **how).token_ids, CausalBackend)
    assert found == [OUT_OF_ORDER, 1, 1]


def test_compiled_rungs_reduce_the_overhead_of_launches(gpu, monkeypatch, folder):
    how = []
    monkeypatch.setattr(torch, "compile", lambda forward, **given: (how.append(given), forward)[1])
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)  # it imports a second's worth of modules
    found = [*ladder.climb(load(folder, CUDA), PROMPT, max_new_tokens=2, rungs=[3, 4], runs=1)]
    assert [rung.failure for rung in found] == [None] * 2
    assert {rung.token_ids for rung in found} == {found[0].token_ids}
    assert [given["mode"] for given in how] == ["reduce-overhead"]


def test_memory_of_a_gpu(gpu):
    device = devices.choose_device("auto")
    assert device == "cuda"
    assert devices.choose_dtype("auto", device, "float16") == "float16"
    assert devices.memory_for_caches(device) == int(0.8 * (10**9 + 3 * 10**8 - 10**8))
    assert devices.peak_memory(device) == 4 * 10**8
    assert devices._names() == ["cpu", CUDA]


def test_what_fake_tensors_refuse_fails_here(gpu):
    """The tests above would notice."""
    there, here = torch.zeros(3, device=CUDA), torch.zeros(3)
    with pytest.raises(AssertionError, match="on the device and on the host"):
        there + here
    gpu.waits.clear()
    assert not bool(there[0])
    there.to("cpu", non_blocking=False)
    here.to(CUDA)
    here.to(CUDA, non_blocking=True)
    assert len(gpu.waits) == 3
    store = KeyValues([[Kept(1, 2)]], torch.float16, torch.device(CUDA))
    store.reserve(1)
    with pytest.raises(RuntimeError, match="dtype"):
        store.tensors(0)[0][0] @ torch.zeros(2, 2, device=CUDA)
