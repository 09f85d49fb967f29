"""Models with an encoder, against transformers' own generation."""

from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    M2M100Config,
    MarianConfig,
    MBartConfig,
    PegasusConfig,
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    T5Config,
    UMT5Config,
)

import specbeam
from specbeam import Engine, SpecbeamError, hf
from specbeam.cache.slots import Slots
from specbeam.core.tree import Tree
from specbeam.engine.shared_source import SharedSource, together
from tests.conftest import EOS, beams_of_transformers, examples, random_model

PAD, START = 258, 256
SIZES = {"vocab_size": 259, "pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": START}
PARTS = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
BART = SIZES | {
    **{f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in PARTS.items()},
    **{"d_model": 32, "max_position_embeddings": 128, "init_std": 0.4, "bos_token_id": 256},
    "forced_eos_token_id": None,
}
T5 = SIZES | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "initializer_factor": 2.0}
KINDS = {
    "t5": lambda: T5Config(**T5),
    "t5, gated": lambda: T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "umt5": lambda: UMT5Config(**T5),
    "bart": lambda: BartConfig(**BART),
    "mbart": lambda: MBartConfig(**BART),
    "marian": lambda: MarianConfig(**BART),
    "pegasus": lambda: PegasusConfig(**BART),
    "m2m100": lambda: M2M100Config(**BART | {"pad_token_id": 1}),
}
PROMPTS = [[10, 11, 12, 13, EOS], [7, EOS], [*range(40, 70), EOS]]


def make(kind, seed=0, attention="sdpa", **changes):
    torch.manual_seed(seed)
    config = KINDS[kind]()
    config.update(changes)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


@cache
def pair(kind, attention="sdpa"):
    model = make(kind, attention=attention)
    return model, hf.wrap(model)


# Positions reach the decoder in three ways: biases (T5), counted embeddings (BART), embeddings by ids (M2M100).
MARKS = {kind: () if kind in ("t5", "bart", "m2m100") else pytest.mark.thorough for kind in KINDS}
"""By kind of model: the other kinds are left to thorough mode."""


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        *((kind, "sdpa") for kind in KINDS),
        *(pytest.param(kind, "eager", marks=marks) for kind, marks in MARKS.items()),
    ],
)
def test_texts_equal_the_texts_of_transformers(kind, attention):
    model, lm = pair(kind, attention)
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 20, "length_penalty": 0.8}
    for prompt in PROMPTS:
        (expected,), _ = beams_of_transformers(model, prompt, max_new_tokens=20)
        assert specbeam.generate(lm, prompt, max_new_tokens=20).token_ids == expected
        expected, scores = beams_of_transformers(model, prompt, **options)
        found = specbeam.generate(lm, prompt, **options).sequences
        for got, tokens, score in zip(found, expected, scores, strict=True):
            assert got.token_ids == tokens[: len(got.token_ids)]
            assert got.score == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks) for kind, marks in MARKS.items()])
def test_drafts_and_batches_change_nothing(kind):
    _, lm = pair(kind)
    near = hf.wrap(make(kind, seed=1))
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 16}
    alone = [[s.token_ids for s in specbeam.generate(lm, prompt, **options).sequences] for prompt in PROMPTS]
    for draft in (None, "ngram", "suffix", near, lm):
        sizes = {} if draft is None else {"num_draft_tokens": 4, "draft_width": 6}
        results = specbeam.generate(lm, PROMPTS, draft=draft, **options, **sizes)
        assert [[s.token_ids for s in result.sequences] for result in results] == alone
        if draft is lm:
            assert all(r.stats.steps_per_target_pass > 1.5 for r in results)


def encoded(backend, prompts):
    """What the encoder gives for some prompts in one pass."""
    return backend.place(backend.encode([*map(np.array, prompts)], range(1), None))


@contextmanager
def encoder_shapes(lm):
    """A list that gets the prompts and tokens of each call of the encoder of transformers."""
    shapes = []
    hook = lm.backend.model.get_encoder().register_forward_hook(lambda _, of, out: shapes.append((*out[0].shape[:2],)))
    try:
        yield shapes
    finally:
        hook.remove()


def submitted(lm, prompts, options, **limits):
    """An engine with a request for each prompt, and the requests."""
    engine = Engine(lm, **limits)
    return engine, [engine.submit(prompt, options) for prompt in prompts]


OF_LENGTHS = [[2 + (n * k) % 250 for k in range(1, n)] for n in (9, 3, 12, 60, 10, 2, 12, 64, 11)]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind):
    """Each prompt gets what transformers' encoder gives for it alone."""
    model, lm = pair(kind)
    for prompt, source in zip(OF_LENGTHS, encoded(lm.backend, OF_LENGTHS), strict=True):
        (alone,) = encoded(lm.backend, [prompt])
        with torch.no_grad():
            expected = model.get_encoder()(torch.tensor([prompt])).last_hidden_state
        torch.testing.assert_close(source.states, expected, atol=1e-4, rtol=1e-5)
        for ours, theirs in zip(source.keys + source.values, alone.keys + alone.values, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_prompts_that_arrive_together_are_read_together():
    """Calls of the encoder have little padding, and some thousand tokens at most. While others write, each waits."""
    _, lm = pair("t5")
    alone = [specbeam.generate(lm, prompt, max_new_tokens=6).token_ids for prompt in OF_LENGTHS]
    with encoder_shapes(lm) as shapes:
        engine, requests = submitted(lm, OF_LENGTHS, {"max_new_tokens": 6})
        engine.step()
        assert sorted(shapes) == [(2, 2), (2, 63), (5, 11)]
        engine.run()
        assert len(shapes) == 3
    assert [request.result().token_ids for request in requests] == alone
    with encoder_shapes(lm) as shapes:
        engine, (first,) = submitted(lm, [[5, 6]], {"max_new_tokens": 20})
        engine.step()
        requests = [engine.submit(prompt, {"max_new_tokens": 6}) for prompt in OF_LENGTHS]
        for read in ([(5, 11)], [(2, 2)], [(2, 63)], []):
            del shapes[:]
            engine.step()
            assert shapes == read
        assert not first.done
        engine.run()
    assert [request.result().token_ids for request in requests] == alone


def test_the_encoder_reads_at_most_some_thousand_tokens_at_once():
    backend = pair("t5")[1].backend
    groups = together(backend, [SharedSource(np.full(n, 5)) for n in [1000] * 20 + [1]])
    assert [[len(one.source) for one in group] for group in groups] == [[1000] * 8, [1000] * 8, [1000] * 4, [1]]
    assert [*map(len, together(backend, [SharedSource(np.full(9000, 5)) for _ in range(2)]))] == [1, 1]


def test_an_encoder_that_can_be_divided_is_divided_while_others_write(monkeypatch):
    """As an encoder of audio is. Prompts that arrive later are read for themselves."""
    lm = hf.wrap(make("t5"))
    backend, whole, calls = lm.backend, lm.backend.encode, []
    alone = [specbeam.generate(lm, prompt, max_new_tokens=30).token_ids for prompt in PROMPTS]

    def encode(sources, layers, begun):
        calls.append(([len(source) for source in sources], layers))
        assert (begun is None) == (layers.start == 0)
        assert begun in (None, [(len(source), layers.start) for source in sources])
        if layers.stop == 3:
            return whole(sources, range(1), None)
        return [(len(source), layers.stop) for source in sources]

    monkeypatch.setattr(backend, "encoder_layers", 3)
    monkeypatch.setattr(backend, "encode", encode)
    engine, (first,) = submitted(lm, PROMPTS[:1], {"max_new_tokens": 30}, max_pass_seconds=0)
    engine.step()
    assert calls == [([5], range(3))]  # nobody waits
    near = [PROMPTS[2], PROMPTS[2][3:]]
    requests = [engine.submit(prompt, {"max_new_tokens": 30}) for prompt in near]
    engine.step()
    requests.append(engine.submit(PROMPTS[2][1:], {"max_new_tokens": 30}))
    for _ in range(5):
        engine.step()
    both, last = [31, 28], [30]
    parts = [range(layer, layer + 1) for layer in range(3)]
    assert calls[1:] == [(both, part) for part in parts] + [(last, part) for part in parts]
    assert not first.done
    engine.run()
    assert len(calls) == 7
    assert [first.result().token_ids, requests[0].result().token_ids] == [alone[0], alone[2]]


def test_a_prompt_is_read_once_for_a_model_and_a_draft_with_its_encoder():
    lm, other = hf.wrap(make("bart")), make("bart", seed=1)
    other.model.encoder.load_state_dict(lm.backend.model.model.encoder.state_dict())
    options = {"max_new_tokens": 12, "num_draft_tokens": 2, "draft_width": 1}
    plain = specbeam.generate(lm, PROMPTS[0], max_new_tokens=12)
    for draft, passes in ((lm, 1), (hf.wrap(other), 1), (hf.wrap(make("bart", seed=1)), 2)):
        with encoder_shapes(lm) as shapes, encoder_shapes(draft) as of_draft:
            found = specbeam.generate(lm, PROMPTS[0], draft=draft, **options)
        assert len(shapes) + (0 if draft is lm else len(of_draft)) == passes
        assert found.token_ids == plain.token_ids
        assert found.stats.drafted > 0


@settings(max_examples=examples(0.5))
@given(st.data())
@pytest.mark.parametrize("kind", ["t5", "umt5", "bart", "m2m100"])
def test_a_tree_at_once_is_each_sequence_alone(kind, data):
    """Against transformers' decoder, which is given each sequence by itself."""
    model, lm = pair(kind)
    prompt = PROMPTS[data.draw(st.integers(0, 2))]
    tree = Tree([START])
    slots = Slots(tree, lm.backend)
    (source,) = encoded(lm.backend, [prompt])
    nodes = [tree.tip]
    token = st.integers(2, 255)  # 1 is M2M100's padding
    for _ in range(data.draw(st.integers(1, 3))):
        parents = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=4))
        nodes += tree.add(parents, data.draw(st.lists(token, min_size=len(parents), max_size=len(parents)))).tolist()
        wanted = np.array(sorted(data.draw(st.sets(st.sampled_from(nodes), min_size=1))))
        pending = slots.missing(wanted)
        logits = lm.backend.forward(
            [slots.tree_batch(pending, np.flatnonzero(np.isin(pending, wanted)), source=source)]
        )
        for node, row in zip(wanted.tolist(), logits, strict=True):
            sequence = torch.tensor([tree.tokens(tree.path(node)).tolist()])
            earlier = torch.ones(1, 1, sequence.shape[1], sequence.shape[1]).tril().bool()  # UMT5 of 5.17 has no mask
            given = {"decoder_input_ids": sequence, "decoder_attention_mask": earlier}
            with torch.no_grad():
                expected = model(input_ids=torch.tensor([prompt]), **given).logits[0, -1]
            torch.testing.assert_close(row, expected, atol=2e-3, rtol=0)  # some logits are over 10


def test_the_callers_model_stays_as_it_was():
    for kind in ("t5", "bart"):
        model, lm = pair(kind)
        specbeam.generate(lm, PROMPTS[0], max_new_tokens=4)
        decoder = model.get_decoder()
        assert not any("compute_bias" in vars(module) for module in decoder.modules())
        assert not any(module._forward_hooks for module in decoder.modules())


def test_what_the_checkpoint_forces_and_forbids_holds():
    model = make("bart")

    def greedy():
        return specbeam.generate(hf.wrap(model), PROMPTS[0], max_new_tokens=8).token_ids

    plain, config = greedy(), model.generation_config
    config.forced_bos_token_id, config.forced_eos_token_id = 77, EOS
    config.bad_words_ids, config.suppress_tokens = [[plain[0]], [plain[1], plain[2]]], [plain[3]]
    config.no_repeat_ngram_size = 2
    after_forced = greedy()[1]
    config.begin_suppress_tokens = [after_forced]
    lm, got = hf.wrap(model), greedy()
    assert ([got], None) == beams_of_transformers(model, PROMPTS[0], max_new_tokens=8)
    assert (got[0], got[-1]) == (77, EOS)
    assert got[1] != after_forced
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 8}
    expected, scores = beams_of_transformers(model, PROMPTS[0], **options)
    for draft in (None, "ngram", lm):
        result = specbeam.generate(lm, PROMPTS[0], draft=draft, **options)
        assert all(s.token_ids == t[: len(s.token_ids)] for s, t in zip(result.sequences, expected, strict=True))
        assert [s.score for s in result.sequences] == pytest.approx(scores, abs=1e-4)


def test_a_folder_is_loaded_and_reads_text(save, caplog):
    model = make("t5")
    lm = specbeam.load(save(model), device="cpu")
    assert lm.backend.name == "transformers"
    assert "'t5' is not supported" in caplog.text
    ids = lm.tokenizer("hello").input_ids
    (expected,), _ = beams_of_transformers(model, ids, max_new_tokens=12, eos_token_id=sorted(lm.eos_token_ids))
    result = specbeam.generate(lm, "hello", max_new_tokens=12)
    assert result.token_ids == expected
    assert result.text == lm.decode(expected)
    assert "".join(piece.text for piece in specbeam.stream(lm, "hello", max_new_tokens=12)) == result.text


def test_what_cannot_be_is_one_line():
    _, lm = pair("t5")
    causal = hf.wrap(random_model("llama"))
    with pytest.raises(SpecbeamError, match="begins its sequences with"):
        specbeam.generate(lm, PROMPTS[0], draft=causal)
    with pytest.raises(SpecbeamError, match="begins its sequences with"):
        specbeam.generate(causal, [1, 2], draft=lm)
    with pytest.raises(SpecbeamError, match="context of 128"):
        specbeam.generate(pair("bart")[1], [5] * 200)
    config = Speech2TextConfig(vocab_size=259, d_model=24, encoder_layers=1, decoder_layers=1, pad_token_id=PAD)
    with pytest.raises(SpecbeamError, match="reads input_features, not text"):
        hf.wrap(Speech2TextForConditionalGeneration(config).eval())
