"""Draft heads that read hidden states of the target: multi-token prediction (MTP) and EAGLE-3."""

import random
import re
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import specbeam
from specbeam import SpecbeamError
from specbeam.cache.slots import Slots
from specbeam.cli import main
from specbeam.cli.serve import _make_models
from specbeam.core.tree import Tree
from tests.backends.test_conformance import FAMILIES
from tests.cases import BOS, EOS, FOLDERS, Models, draw_case, prompt_of, run_case
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import byte_tokenizer, examples, random_model
from tests.engine.conftest import assert_memory_is_within_its_limit, assert_nothing_is_held
from tests.engine.test_exactness import alone
from tests.heads import add_mtp, write_eagle3

TOKENS = [3, 17, 5, 9, 250, 44, 7, 3, 17, 5, 100, 8]
DRAFTED = [21, 6, 90]
"""Tokens that the target has not evaluated: there a head reads its own features."""
SOME = [*range(0, 259, 3)]
"""The tokens that an EAGLE-3 head has."""


def norm(x, weight, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x, positions, theta):
    """Halves of heads, rotated. x: [heads, n, features]"""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** -(torch.arange(half, dtype=torch.float64) / half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


def attention(x, w, theta, heads, kv_heads, size, norms=None, eps=1e-6, rotates=1.0, gated=False):
    """Causal attention with projections w("q") to w("o") of all rows of x, [n, features]."""
    n, split = len(x), lambda y, count: y.view(len(x), count, -1).transpose(0, 1)
    q, k, v = split(x @ w("q").T, heads), split(x @ w("k").T, kv_heads), split(x @ w("v").T, kv_heads)
    q, gate = (q[..., :size], q[..., size:]) if gated else (q, None)
    if norms is not None:
        q, k = norm(q, norms[0], eps), norm(k, norms[1], eps)
    positions, first = torch.arange(n, dtype=torch.float64), int(size * rotates)
    q, k = (torch.cat([rotated(y[..., :first], positions, theta), y[..., first:]], -1) for y in (q, k))
    k, v = (y.repeat_interleave(heads // kv_heads, 0) for y in (k, v))
    scores = (q @ k.transpose(1, 2)) / size**0.5 + torch.full((n, n), -torch.inf).triu(1)
    out = scores.softmax(-1) @ v
    return (out * gate.sigmoid() if gated else out).transpose(0, 1).reshape(n, -1) @ w("o").T


def mlp(x, w):
    return (torch.nn.functional.silu(x @ w("gate").T) * (x @ w("up").T)) @ w("down").T


def states_of(model, tokens):
    """The hidden states before each layer, and the last normed ones, [layers + 1, n, hidden]."""
    with torch.no_grad():
        return torch.stack(model(torch.tensor([tokens]), output_hidden_states=True).hidden_states)[:, 0].double()


def mtp_logits(model, head, tokens, drafted):
    """Logits after each token but the first, with the head's own features before all drafted tokens but the first."""
    w = {name: torch.tensor(tensor).double() for name, tensor in head.items()}
    weights, config = {n: p.double() for n, p in model.state_dict().items()}, model.config
    theta, eps, gated = config.rope_parameters["rope_theta"], config.rms_norm_eps, "qwen3_5" in config.model_type
    if gated:  # its norms have their weights less 1
        w = {name: tensor + (tensor.ndim == 1) for name, tensor in w.items()}
    features, logits = list(states_of(model, tokens)[-1]), []
    sequence = tokens + drafted
    for end in range(len(tokens), len(sequence) + 1):
        e = weights["model.embed_tokens.weight"][sequence[1:end]]
        both = [
            norm(e, w["mtp.pre_fc_norm_embedding.weight"], eps),
            norm(torch.stack(features[: end - 1]), w["mtp.pre_fc_norm_hidden.weight"], eps),
        ]
        x, layer = torch.cat(both, -1) @ w["mtp.fc.weight"].T, "mtp.layers.0."
        norms = [w[f"{layer}self_attn.{n}_norm.weight"] for n in "qk"] if "qwen3" in config.model_type else None
        x = x + attention(
            norm(x, w[f"{layer}input_layernorm.weight"], eps),
            lambda n: w[f"mtp.layers.0.self_attn.{n}_proj.weight"],
            *(theta, config.num_attention_heads, config.num_key_value_heads, config.head_dim, norms, eps),
            *(config.rope_parameters.get("partial_rotary_factor", 1.0), gated),
        )
        x = x + mlp(
            norm(x, w[f"{layer}post_attention_layernorm.weight"], eps),
            lambda n: w[f"mtp.layers.0.mlp.{n}_proj.weight"],
        )
        states = norm(x, w["mtp.norm.weight"], eps)
        features = features[: len(tokens)] + list(states[len(tokens) - 1 :])
        # the feature of the last token that the target has evaluated is the target's
        logits = states @ weights["lm_head.weight"].T
    return logits.numpy()


def eagle3_logits(model, head, tokens, drafted):
    """The same of an EAGLE-3 head."""
    w = {name.removesuffix(".weight"): torch.tensor(tensor) for name, tensor in head.items()}
    w = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in w.items()}
    states, count = states_of(model, tokens), model.config.num_hidden_layers
    embedding = model.state_dict()["model.embed_tokens.weight"].double()
    read = torch.cat([states[2], states[count // 2], states[count - 3]], -1) @ w["fc"].T
    features, sequence, layer = list(read), tokens + drafted, "midlayer."
    for end in range(len(tokens), len(sequence) + 1):
        e = norm(embedding[sequence[1:end]], w[f"{layer}input_layernorm"], 1e-5)
        x = torch.stack(features[: end - 1])
        beside = torch.cat([e, norm(x, w[f"{layer}hidden_norm"], 1e-5)], -1)
        x = x + attention(beside, lambda n: w[f"midlayer.self_attn.{n}_proj"], 1000.0, 4, 2, 8)
        x = x + mlp(norm(x, w[f"{layer}post_attention_layernorm"], 1e-5), lambda n: w[f"midlayer.mlp.{n}_proj"])
        features = features[: len(tokens)] + list(x[len(tokens) - 1 :])
        logits = norm(x, w["norm"], 1e-5) @ w["lm_head"].T
    found = torch.full((len(sequence) - 1, model.config.vocab_size), -torch.inf, dtype=torch.float64)
    found[:, torch.arange(len(w["lm_head"])) + w.get("d2t", 0)] = logits
    return found.numpy()


def logits_of(lm, head, tokens, drafted, pieces=(100,)):
    """Logits of a head after each token, which it and the target read in pieces of these sizes."""
    tree = Tree(tokens + drafted)
    theirs, own, rows, start = Slots(tree, lm.backend), Slots(tree, head.backend), [], 0
    for size in pieces:
        nodes = np.arange(start, min(start + size, len(tokens)))
        lm.backend.forward([theirs.tree_batch(nodes, nodes[:0])])
        batch = own.tree_batch(nodes, np.arange(len(nodes)))
        batch.features = theirs.at(np.maximum(nodes - 1, 0))
        rows.append(head.backend.forward([batch]))
        start += size
    for node in range(len(tokens), len(tree)):
        batch = own.tree_batch(np.array([node]), np.array([0]))
        is_first = node == len(tokens)  # the target has evaluated its parent
        batch.features = theirs.at(np.array([node - 1])) if is_first else -2 - own.at(np.array([node - 1]))
        rows.append(head.backend.forward([batch]))
    return np.concatenate(rows)


MTP = [("llama", {"head_dim": 8}), ("qwen3", {}), ("qwen3_5", {})]
"""Models that have heads for multi-token prediction here. Elsewhere only Qwen3.5 has one."""


@pytest.mark.parametrize(("kind", "changes"), MTP)
def test_an_mtp_head_has_the_logits_of_its_formulas(save, kind, changes):
    model = random_model(kind, **changes)
    head = add_mtp(folder := save(model))
    lm = specbeam.load(folder, backend="cpu", quantize="float32")
    found = logits_of(lm, lm.draft_model("mtp"), TOKENS, DRAFTED)
    expected = mtp_logits(model, head, TOKENS, DRAFTED)
    # Of linear attention, transformers' own states are not as exact: tests/backends/test_gated_delta_net.py.
    distance = 2e-2 if kind == "qwen3_5" else 2e-3
    assert (found[0] == -np.inf).all()  # the root has no parent, whose features it would read
    assert expected.std() > 0.5
    assert np.abs(found[1:] - expected).max() < distance


@pytest.mark.parametrize("tokens", [None, SOME])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_eagle3_head_has_the_logits_of_its_formulas(save, tmp_path, kind, tokens):
    model = random_model(kind, num_hidden_layers=6)
    head = write_eagle3(tmp_path / "head", folder := save(model), tokens=tokens)
    lm = specbeam.load(folder, backend="cpu", quantize="float32")
    found = logits_of(lm, lm.draft_model(tmp_path / "head"), TOKENS, DRAFTED)
    expected = eagle3_logits(model, head, TOKENS, DRAFTED)
    assert (np.isinf(found[1:]) == np.isinf(expected)).all()
    is_there = np.isfinite(expected)
    assert expected[is_there].std() > 0.5
    assert np.abs(found[1:][is_there] - expected[is_there]).max() < 2e-3


@pytest.fixture(scope="module")
def heads(save, tmp_path_factory):
    """By model: its folder, and the names of its heads. With few tokens, many draft tokens are accepted."""
    made = {}
    for name, kind, size in (("llama", "llama", 12), ("qwen3", "qwen3", 40)):
        model = random_model(kind, vocab_size=size, num_hidden_layers=4, eos_token_id=1, bos_token_id=0)
        add_mtp(folder := save(model))
        few = [*range(0, size, 2)]
        for number, tokens in enumerate((None, few)):
            write_eagle3(tmp_path_factory.getbasetemp() / f"{name} {number}", folder, tokens=tokens)
        made[name] = folder, ["mtp", *(str(tmp_path_factory.getbasetemp() / f"{name} {n}") for n in (0, 1))]
    return made


METHODS = {
    "greedy": {},
    "sample": {"do_sample": True, "seed": 5},
    "2 beams": {"num_beams": 2},
    "8 beams": {"num_beams": 8, "num_return_sequences": 8},
    "drawn beams": {"num_beams": 4, "do_sample": True, "seed": 5},
}


@pytest.mark.parametrize("how", ["float32", "int8"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_texts_are_those_without_a_head(heads, name, method, how):
    folder, drafts = heads[name]
    lm = specbeam.load(folder, backend="cpu", quantize=how, threads=1)
    options = {"max_new_tokens": 24, "min_new_tokens": 20, **METHODS[method]}
    plain = specbeam.generate(lm, [3, 5, 2, 7, 4], **options)
    for draft in drafts:
        sizes = {"num_draft_tokens": 3, "draft_width": 2}
        drafted = specbeam.generate(lm, [3, 5, 2, 7, 4], draft=draft, **sizes, **options)
        assert drafted.stats.drafted > 0
        for one, other in zip(plain.sequences, drafted.sequences, strict=True):
            assert (one.token_ids, one.score.hex()) == (other.token_ids, other.score.hex())
            assert one.log_probs == other.log_probs


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_in_the_engine_a_head_reads_the_features_of_the_target(save, tmp_path, monkeypatch, kind, options):
    """Draft tokens alone are made of its own features. Accepted ones are evaluated again."""
    size, prompt = 8, [3, 5, 2, 0, 4]
    model = random_model("qwen3", vocab_size=size, num_hidden_layers=4, eos_token_id=1, bos_token_id=0)
    folder = save(model)
    head = add_mtp(folder) if kind == "mtp" else write_eagle3(tmp_path / "head", folder, tokens=[*range(size - 1)])
    lm = specbeam.load(folder, backend="cpu", quantize="float32", threads=1)
    draft = lm.draft_model("mtp" if kind == "mtp" else tmp_path / "head")
    formulas, forward = {"mtp": mtp_logits, "eagle3": eagle3_logits}[kind], draft.backend.forward
    tokens, is_own, depths = {}, {}, []  # by slot

    def watched(segments):
        found = forward(segments)
        (segment,) = segments
        tokens.update(zip(segment.slots.tolist(), segment.tokens.tolist(), strict=True))
        is_own.update(zip(segment.slots.tolist(), (segment.features < 0).tolist(), strict=True))
        for row, logits in zip(segment.wanted.tolist(), found, strict=True):
            path = [*segment.prefix, *segment.suffixes[row]][: segment.positions[row] + 1]
            depth = sum(is_own[slot] for slot in path)
            assert not any(is_own[slot] for slot in path[: len(path) - depth])
            text = [tokens[slot] for slot in path]
            expected = formulas(model, head, text[: -depth - 1], text[-depth - 1 :])[-1]
            is_there = np.isfinite(logits)
            assert np.abs(logits[is_there] - expected[is_there]).max() < 2e-3
            depths.append(depth)
        return found

    monkeypatch.setattr(draft.backend, "forward", watched)
    sizes = {"num_draft_tokens": 3, "draft_width": 4}
    result = specbeam.generate(lm, prompt, draft=draft, **sizes, max_new_tokens=10, min_new_tokens=10, **options)
    assert result.stats.accepted > 1
    assert {0, 1, 2} <= {*depths}


WITH_HEADS = ("llama, 8 tokens", "llama, spellings", "qwen3", "glm4", "qwen3_5", "qwen3_5, confident")


class WithHeads(Models):
    """The models of some cases, with heads of both kinds for each."""

    def __init__(self, folder):
        super().__init__(folder)
        for name in WITH_HEADS:
            family, vocabulary = FOLDERS[name]
            architecture, changes = FAMILIES[family]
            ends = {"eos_token_id": EOS, "bos_token_id": BOS, "pad_token_id": EOS}
            sizes = {"vocab_size": vocabulary, "num_hidden_layers": 4, **ends, **changes}
            model = random_model(architecture, seed=zlib.crc32(name.encode()), **sizes)
            model.save_pretrained(folder / name)
            byte_tokenizer(vocab_size=vocabulary).save_pretrained(folder / name)
            add_mtp(folder / name)
            tokens = [*range(2, vocabulary, 2)]
            write_eagle3(folder / f"eagle3 of {name}", folder / name, tokens=tokens)

    def draft(self, case, name):
        lm = self.load(case["model"], case["format"])
        return name and lm.draft_model("mtp" if name == "mtp" else self.folder / f"eagle3 of {case['model']}")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return WithHeads(tmp_path_factory.mktemp("models"))


def case_with_heads(seed):
    """The first case of a seed whose model has heads here, with a head for most of its requests."""
    index = 0
    while True:
        case, index = draw_case(seed, index), index + 1
        if case["model"] in WITH_HEADS and case["format"] not in ("torch", "transformers"):
            draw = random.Random(seed)
            for one in case["requests"]:
                can_draft = one["kind"] != "samples" and one["options"].get("num_return_sequences", 1) >= 1
                one["draft"] = draw.choice((None, "mtp", "mtp", "eagle3", "eagle3")) if can_draft else None
                if one["draft"] is None:
                    one["options"] = {name: value for name, value in one["options"].items() if "draft" not in name}
            return case


@settings(max_examples=examples(3))
@given(case=st.integers(0, 10**9).map(case_with_heads))
def test_batches_preemption_and_shared_prefixes_change_no_bit(models, case):
    checks = {"stepped": assert_memory_is_within_its_limit, "ended": assert_nothing_is_held}
    outcomes = run_case(case, models, **checks)
    for number, (request, outcome) in enumerate(zip(case["requests"], outcomes, strict=True)):
        if "cancel" in request or "timeout" in request or "broken" in outcome or "error" in outcome:
            continue
        (expected,) = run_case(alone(case, request, prompt_of(case, number, outcomes)), models)
        assert outcome == expected


def test_a_gguf_file_has_the_head_of_its_folder(save, tmp_path):
    """The block behind the layers, with llama.cpp's names."""
    model = random_model("qwen3_5", tie_word_embeddings=True)
    file, folder = tmp_path / "m.gguf", save(model)
    head = add_mtp(folder)
    write_gguf(file, model, head=head)
    lms = [specbeam.load(source, backend="cpu", quantize="float32") for source in (folder, file)]
    logits = [logits_of(lm, lm.draft_model("mtp"), TOKENS, DRAFTED) for lm in lms]
    assert np.abs(logits[0][1:] - logits[1][1:]).max() < 1e-3  # the target's value heads are in another order


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_the_pieces_in_which_a_prompt_is_read_change_no_bit(save, tmp_path, kind):
    model = random_model("qwen3", num_hidden_layers=6)
    add_mtp(folder := save(model))
    write_eagle3(tmp_path / "head", folder, tokens=SOME)
    for quantize in ("float32", "int8", "int4"):
        lm = specbeam.load(folder, backend="cpu", quantize=quantize)
        head = lm.draft_model("mtp" if kind == "mtp" else tmp_path / "head")
        whole = logits_of(lm, head, TOKENS, DRAFTED)
        assert whole.tobytes() == logits_of(lm, head, TOKENS, DRAFTED, [1, 1, 2, 5, 3]).tobytes()


def test_a_head_computes_the_logits_of_the_first_tokens_alone(save, tmp_path):
    write_eagle3(tmp_path / "head", folder := save(random_model("llama", num_hidden_layers=6)), tokens=SOME)
    lm = specbeam.load(folder, backend="cpu", quantize="float32")
    head, tree = lm.draft_model(tmp_path / "head"), Tree(TOKENS)
    slots, own, nodes = Slots(tree, lm.backend), Slots(tree, head.backend), np.arange(len(tree))
    lm.backend.forward([slots.tree_batch(nodes, nodes[:0])])
    found = []
    for vocab in (259, 100, 1):
        batch = own.tree_batch(nodes, nodes[1:], vocab)
        batch.features = slots.at(np.maximum(nodes - 1, 0))
        found.append(head.backend.forward([batch]))
    assert [one.shape[1] for one in found] == [259, 100, 1]
    assert found[1].tobytes() == found[0][:, :100].tobytes()
    assert found[2].tobytes() == found[0][:, :1].tobytes()


def bad_head(what, folder, target):
    """Write an EAGLE-3 head with a mistake, and return what its refusal says."""
    tokens, changes, tensors = SOME, {}, {}
    if what == "hidden size":
        changes, says = (
            {"target_hidden_size": 48},
            "hidden_size = 48, but the model has 32: give the head of this model",
        )
    elif what == "vocabulary":
        changes, says = {"vocab_size": 300}, "with 300 tokens, but the model has 259"
    elif what == "layers":
        changes = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}}
        says = "before the layers 1, 5, 9, but the model has 6 layers"
    elif what == "two layers":
        changes, says = {"num_hidden_layers": 2}, "EAGLE-3 heads with 2 layers are not supported"
    elif what == "variant":
        changes, says = {"norm_before_residual": True}, "EAGLE-3 heads with norm_before_residual"
    elif what == "token map out of range":
        tensors, says = (
            {"d2t": np.full(len(SOME), 250)},
            "maps row 9 of the logits to token 259, but the vocabulary has 259",
        )
    elif what == "token map without order":
        tensors, says = {"d2t": -np.arange(len(SOME))}, "d2t does not map rows of the logits to ascending tokens"
    elif what == "no token map":
        tensors, says = {"d2t": None}, "has no tensor d2t with the tokens of its 87 rows of logits"
    else:
        tensors, says = {what: None}, f"has no tensor {what}"
    write_eagle3(folder, target, tokens=tokens, **changes)
    file = folder / "model.safetensors"
    stored = {name: tensor for name, tensor in (load_file(file) | tensors).items() if tensor is not None}
    save_file(stored, file, {"format": "pt"})
    return says


BAD = ["hidden size", "vocabulary", "layers", "two layers", "variant", "token map out of range"]
BAD += ["token map without order", "no token map", "fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight"]


@pytest.fixture(scope="module")
def target(save):
    return specbeam.load(save(random_model("llama", num_hidden_layers=6)), backend="cpu", quantize="float32")


@pytest.mark.parametrize("what", BAD)
def test_a_bad_head_is_refused_by_name(target, tmp_path, what):
    says = bad_head(what, tmp_path / "head", target.source)
    with pytest.raises(SpecbeamError, match=re.escape(says)):
        specbeam.generate(target, [5, 6], draft=tmp_path / "head")


def test_a_head_is_no_model_and_no_head_of_another_model(target, save, tmp_path):
    write_eagle3(tmp_path / "head", target.source)
    with pytest.raises(SpecbeamError, match="is a draft head and no model: give it as the draft of its model"):
        specbeam.load(tmp_path / "head")
    head = target.draft_model(tmp_path / "head")
    with pytest.raises(SpecbeamError, match="is a draft head and no model"):
        specbeam.generate(head, [5, 6])
    other = specbeam.load(save(random_model("llama", seed=1)), backend="cpu", quantize="float32")
    with pytest.raises(SpecbeamError, match="was loaded for another model"):
        specbeam.generate(other, [5, 6], draft=head)
    with pytest.raises(SpecbeamError, match="has no head for multi-token prediction"):
        specbeam.generate(other, [5, 6], draft="mtp")


def test_other_backends_refuse_heads(save, tmp_path):
    add_mtp(folder := save(random_model("qwen3", num_hidden_layers=4)))
    lm = specbeam.load(folder, backend="torch", device="cpu", dtype="float32")
    with pytest.raises(SpecbeamError, match="mtp is a draft head, which runs on the cpu backend"):
        specbeam.generate(lm, [5, 6], draft="mtp")


def test_a_model_with_a_head_of_several_layers_runs_without_it(save):
    folder = save(random_model("qwen3", num_hidden_layers=4))
    add_mtp(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"mtp.layers.1.mlp.down_proj.weight": tensors["mtp.fc.weight"]}, file, {"format": "pt"})
    lm = specbeam.load(folder, backend="cpu", quantize="float32")
    assert specbeam.generate(lm, [5, 6], max_new_tokens=3).token_ids
    with pytest.raises(SpecbeamError, match="head for multi-token prediction of several layers is not supported"):
        specbeam.generate(lm, [5, 6], draft="mtp")


def test_the_command_takes_heads(heads, capsys):
    folder, drafts = heads["qwen3"]
    shared = ["--model", str(folder), "--threads", "1", "--quantize", "float32", "--raw", "--max-new-tokens", "8"]
    texts = []
    for draft in ([], *(["--draft", name] for name in drafts)):
        assert main(["generate", "!", *shared, *draft]) == 0
        texts.append(capsys.readouterr().out)
    assert len({*texts}) == 1


def test_the_server_drafts_with_the_head_of_its_model(heads):
    folder, drafts = heads["qwen3"]
    placement = {"backend": "cpu", "quantize": "float32", "threads": 1}
    made = _make_models(
        placement, [("m", str(folder))], [("own", drafts[0]), ("eagle", drafts[1])], default_draft="own"
    )
    served = made.get("m")
    assert all(served.drafts[name].backend.target is served.lm.backend for name in ("own", "eagle"))
