"""Whisper in the native kernels and in PyTorch, against transformers on the same features."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationMixin, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

import specbeam
from specbeam import Engine, SpecbeamError, hf
from specbeam.backends.cpu import CpuBackend
from specbeam.cache.slots import Slots
from specbeam.checkpoints import open_checkpoint
from specbeam.checkpoints.architecture import tensor_names
from specbeam.checkpoints.families import ARCHITECTURES
from specbeam.checkpoints.parameters import parameters
from specbeam.core.selection import AttentionProbe
from specbeam.core.tree import NO_NODES, Tree
from specbeam.engine.shared_source import SharedSource
from specbeam.options.generation_defaults import GenerationDefaults
from tests.backends.test_cpu import ALIKE
from tests.conftest import (
    EOS,
    byte_tokenizer,
    examples,
    in_thorough_mode,
    prompt_and_beam_options,
    reference_folder,
    rewrite,
)

START, PAD, BANDS, POSITIONS = 256, 258, 8, 30
PROMPT = [START, 3, 4]
SIZES = {
    **{"vocab_size": 259, "d_model": 32, "num_mel_bins": BANDS, "init_std": 0.4},
    **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "max_source_positions": POSITIONS},
    **{"decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 56, "max_target_positions": 64},
    **{"decoder_start_token_id": START, "bos_token_id": START, "eos_token_id": EOS, "pad_token_id": PAD},
    "begin_suppress_tokens": None,
}


def random_whisper(seed=0, **changes):
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(WhisperConfig(**SIZES | changes)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


def sound(seed=0, positions=POSITIONS, bands=BANDS):
    return np.random.default_rng(seed).normal(size=(bands, 2 * positions)).astype(np.float32)


def states_of(backend, features):
    """The encoder's output for one source."""
    (states,) = backend.encode([features], range(backend.encoder_layers), None)
    return states


def encoder_calls(monkeypatch, backend):
    """A list that gets the number of sources and the layers of each call of an encoder."""
    calls, encode = [], backend.encode
    monkeypatch.setattr(
        backend, "encode", lambda some, layers, begun: calls.append((len(some), layers)) or encode(some, layers, begun)
    )
    return calls


@pytest.fixture(scope="module")
def pair(save):
    """The same model twice: as transformers runs it and as we do."""

    @cache
    def pair(seed=0, quantize="float32", backend="cpu", **changes):
        model = random_whisper(seed, **changes)
        how = {"quantize": quantize} if backend == "cpu" else {"device": "cpu", "dtype": quantize}
        return model, specbeam.load(save(model, byte_tokenizer()), backend=backend, **how)

    return pair


def of_transformers(model, features, prompt=PROMPT, **options):
    """The new tokens of the sequences of transformers, padded, and their scores."""
    out = GenerationMixin.generate(  # Whisper's own generate is about windows and timestamps
        model,
        torch.tensor(features)[None],
        decoder_input_ids=torch.tensor([prompt]),
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    scores = out.sequences_scores.tolist() if "sequences_scores" in out else [None]
    return out.sequences[:, len(prompt) :].tolist(), scores


def run(lm, sounds, options, prompt=PROMPT, draft=None, **limits):
    """The sequences of each recording, with their scores. All are submitted at once."""
    engine = Engine(lm, **limits)
    requests = [engine.submit(prompt, options, features=one, draft=draft) for one in sounds]
    engine.run()
    assert (engine.cache_tokens, engine.kept_tokens) == (0, 0)
    return [[(s.token_ids, s.score) for s in request.result().sequences] for request in requests]


SHAPES = {
    "of different sizes": {},
    "one layer, one head": {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1},
    "narrow heads": {"d_model": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 6},
    "several splits of attention": {"max_source_positions": 300},
}


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
def test_states_and_logits_equal_those_of_transformers(pair, shape, backend):
    model, lm = pair(backend=backend, **SHAPES[shape])
    features = sound(positions=model.config.max_source_positions)
    tokens = [START, *range(20)]
    with torch.no_grad():
        states = model.model.encoder(torch.tensor(features)[None]).last_hidden_state[0].numpy()
        expected = model(torch.tensor(features)[None], decoder_input_ids=torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(states_of(lm.backend, features), states, atol=1e-4)
    np.testing.assert_allclose(logits(lm.backend, Tree(tokens), np.arange(21), features), expected, atol=2e-4)


def placed(backend, features):
    """The source of a segment, and the slots that hold it."""
    positions = backend.positions(features)
    slots = Slots(Tree([0] * positions), backend)
    own = slots.tree_batch(slots.prepare(slots.tree.prefix), NO_NODES).slots
    (source,) = backend.place([states_of(backend, features)], [own])
    return source, slots


def logits(backend, tree, nodes, features):
    source, kept = placed(backend, features)
    slots = Slots(tree, backend)
    pending = slots.missing(nodes)
    found = backend.forward([slots.tree_batch(pending, np.flatnonzero(np.isin(pending, nodes)), source=source)])
    kept.close()
    return found


@pytest.mark.parametrize(("quantize", "likeness"), [("int8", 0.99), ("int4", 0.8)])
def test_quantized_weights_give_near_logits_and_keep_convolutions(pair, quantize, likeness):
    (_, lm), (_, exact) = pair(quantize=quantize), pair()
    tokens = Tree([START, *range(20)])
    both = [logits(one.backend, tokens, np.arange(21), sound()) for one in (lm, exact)]
    assert np.corrcoef(both[0].ravel(), both[1].ravel())[0, 1] > likeness
    parts = lm.backend._weights.parts
    kept = ("encoder.conv1.weight", "encoder.conv2.weight", "encoder.positions.weight", "positions.weight")
    assert {parts[name][0].format for name in kept} == {0}
    assert parts["encoder.blocks.0.mlp.up.weight"][0].format != 0


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("beams", [1, 2, 3, 4])
def test_sequences_equal_those_of_transformers(pair, beams, backend):
    for seed in range(3 if in_thorough_mode() else 1):
        model, lm = pair(seed, backend=backend)
        options = {"max_new_tokens": 20} | ({"num_beams": beams, "num_return_sequences": beams} if beams > 1 else {})
        sounds = [sound(i) for i in range(4)]
        for features, found in zip(sounds, run(lm, sounds, options), strict=True):
            expected, scores = of_transformers(model, features, **options)
            for (tokens, score), theirs, of_theirs in zip(found, expected, scores, strict=True):
                assert tokens == theirs[: len(tokens)]
                assert beams == 1 or score == pytest.approx(of_theirs, abs=1e-4)


@settings(max_examples=examples(0.5))
@given(st.data())
def test_beams_with_any_options_equal_those_of_transformers(pair, data):
    model, lm = pair()
    prompt, options = prompt_and_beam_options(data, 259)
    features = sound(data.draw(st.integers(0, 9)))
    expected, scores = of_transformers(model, features, prompt, **options)
    engine = Engine(lm)
    request = engine.submit(prompt, options, features=features)
    engine.run()
    padding = {*options["eos_token_id"], EOS, PAD}
    for got, tokens, score in zip(request.result().sequences, expected, scores, strict=False):
        if got.token_ids == tokens[: len(got.token_ids)]:
            assert set(tokens[len(got.token_ids) :]) <= padding
            assert got.score == pytest.approx(score, abs=1e-4, rel=1e-5)
        else:
            assert got.score == pytest.approx(score, rel=2e-7)  # a tie, which topk may resolve in another order


@pytest.mark.parametrize("quantize", ["float32", "int8"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 4}, {"do_sample": True, "seed": 7}], ids=["1", "4", "sampled"])
def test_batches_chunks_drafts_and_preemption_change_no_bit(pair, options, quantize):
    _, lm = pair(quantize=quantize)
    options = {"max_new_tokens": 16, "num_return_sequences": options.get("num_beams", 1)} | options
    sounds, prompt = [sound(i) for i in range(5)], [START, *range(9)]
    alone = [run(lm, [one], options, prompt)[0] for one in sounds]
    near = pair(1, quantize)[1]
    for draft in (None, "ngram", lm, near):
        for limits in ({"max_pass_seconds": 0}, {"max_batch_tokens": 4}, {"max_cache_tokens": 100, "max_requests": 3}):
            assert run(lm, sounds, options, prompt, draft, **limits) == alone


@pytest.mark.parametrize("quantize", ["float32", "int8", "int4"])
def test_threads_and_instruction_sets_change_no_bit(save, quantize):
    model = random_whisper(max_source_positions=600)
    checkpoint, features = open_checkpoint(save(model, byte_tokenizer())), sound(positions=600)
    tree, found = Tree([START, 1, 2, 3]), []
    for isa, threads in [("", 3), *((isa, 1) for isa in ALIKE)]:
        backend = CpuBackend(checkpoint, quantize, threads, isa)
        found.append((states_of(backend, features), logits(backend, tree, np.arange(4), features)))
    for states, of_nodes in found[1:]:
        np.testing.assert_array_equal(states, found[0][0])
        np.testing.assert_array_equal(of_nodes, found[0][1])
    backend = CpuBackend(checkpoint, quantize, isa="portable")
    with torch.no_grad():
        expected = model.model.encoder(torch.tensor(features)[None]).last_hidden_state[0].numpy()
    likeness = np.corrcoef(states_of(backend, features).ravel(), expected.ravel())[0, 1]
    assert likeness > {"float32": 1 - 1e-6, "int8": 0.99, "int4": 0.7}[quantize]


def test_sound_is_read_for_one_request_at_a_time_while_another_writes(pair, monkeypatch):
    _, lm = pair()
    read = encoder_calls(monkeypatch, lm.backend)
    engine = Engine(lm)
    requests = [engine.submit(PROMPT, {"max_new_tokens": 12}, features=sound())]
    engine.step()
    requests += [engine.submit(PROMPT, {"max_new_tokens": 12}, features=sound()) for _ in range(3)]
    for number in range(3):
        assert len(read) == number + 1
        engine.step()
    engine.run()
    assert len({tuple(request.result().token_ids) for request in requests}) == 1
    run(lm, [sound()] * 3, {"max_new_tokens": 2})
    assert read == [(1, range(2))] * 7


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_an_encoders_pass_in_parts_gives_the_same_states(pair, backend):
    lm = pair(backend=backend, encoder_layers=4)[1].backend
    for parts in ([1, 1, 1, 1], [3, 1], [2, 2]):
        states, layer = None, 0
        for count in parts:
            states, layer = lm.encode([sound(), sound(1)], range(layer, layer + count), states), layer + count
        for found, features in zip(states, (sound(), sound(1)), strict=True):
            np.testing.assert_array_equal(found, states_of(lm, features))
    if backend == "cpu":
        for layers in (range(0), range(2, 5), range(-1, 2)):
            with pytest.raises(RuntimeError, match="there are no such layers"):
                lm.encode([sound()], layers, states)


@pytest.mark.parametrize("quantize", ["float32", "int8"])
def test_an_encoders_pass_is_divided_while_others_write(pair, quantize, monkeypatch):
    """With no time at all, one layer runs between two passes of the others, and no text changes."""
    _, lm = pair(quantize=quantize, encoder_layers=4)
    expected = [run(lm, [sound(i)], {"max_new_tokens": 20})[0][0][0] for i in range(3)]
    calls = encoder_calls(monkeypatch, lm.backend)
    engine = Engine(lm, max_pass_seconds=0)
    requests = [engine.submit(PROMPT, {"max_new_tokens": 20}, features=sound(0))]
    engine.step()
    assert calls == [(1, range(4))]  # nobody waits
    requests += [engine.submit(PROMPT, {"max_new_tokens": 20}, features=sound(i)) for i in (1, 2)]
    for layer in range(8):
        engine.step()
        assert calls[1:] == [(1, range(i % 4, i % 4 + 1)) for i in range(layer + 1)]
        assert not requests[0].done
    engine.run()
    assert [request.result().token_ids for request in requests] == expected
    assert (engine.cache_tokens, engine.kept_tokens) == (0, 0)
    calls.clear()
    engine = Engine(lm, max_pass_seconds=0)
    requests = [engine.submit(PROMPT, {"max_new_tokens": 20}, features=sound(0))]
    engine.step()
    requests.append(engine.submit(PROMPT, {"max_new_tokens": 20}, features=sound(1)))
    engine.step()
    engine.step()
    requests[0].cancel()
    engine.run()
    assert requests[1].result().token_ids == expected[1]
    assert sum(len(layers) for _, layers in calls) == 8  # it goes on where it was


@pytest.mark.parametrize("backend", ["cpu", "torch", "transformers"])
def test_requests_about_one_sound_share_the_encoder(pair, save, backend, monkeypatch):
    model, lm = pair(backend="torch" if backend == "torch" else "cpu")
    if backend == "transformers":
        lm = specbeam.load(save(model, byte_tokenizer()), backend=backend, device="cpu")
    read = encoder_calls(monkeypatch, lm.backend)
    shared, expected = SharedSource(sound()), run(lm, [sound()], {"max_new_tokens": 9})
    assert len(read) == 1
    for options in ({"max_new_tokens": 9}, {"max_new_tokens": 9}, {"max_new_tokens": 9, "num_beams": 3}):
        found = run(lm, [shared], options)
        assert found == expected or "num_beams" in options
    assert len(read) == 2
    with pytest.raises(SpecbeamError, match="have the shape"):
        Engine(lm).submit(PROMPT, features=SharedSource(sound(positions=7)))


def test_a_source_takes_slots_of_the_cache_and_gives_them_back(pair):
    _, lm = pair()
    engine = Engine(lm, max_cache_tokens=100)
    request = engine.submit(PROMPT, {"max_new_tokens": 8, "num_beams": 3}, features=sound())
    engine.step()
    assert POSITIONS < engine.cache_tokens < POSITIONS + 10  # beams share it
    engine.run()
    assert engine.cache_tokens == 0
    assert POSITIONS + 8 < request.result().stats.peak_slots < POSITIONS + 40
    with pytest.raises(SpecbeamError, match="need 41 cache slots, the engine has 40"):
        Engine(lm, max_cache_tokens=40).submit(PROMPT, {"max_new_tokens": 8}, features=sound())


@settings(max_examples=examples(0.3))
@given(st.data())
def test_a_tree_at_once_is_each_sequence_alone(pair, data):
    _, lm = pair(quantize=data.draw(st.sampled_from(["float32", "int8"])))
    tree, features = Tree(PROMPT), sound(data.draw(st.integers(0, 3)))
    nodes = [tree.tip]
    for _ in range(data.draw(st.integers(1, 3))):
        parents = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=4))
        tokens = data.draw(st.lists(st.integers(0, 255), min_size=len(parents), max_size=len(parents)))
        nodes += tree.add(parents, tokens).tolist()
    wanted = np.array(sorted({*nodes}))
    for node, row in zip(wanted.tolist(), logits(lm.backend, tree, wanted, features), strict=True):
        path = tree.tokens(tree.path(node)).tolist()
        np.testing.assert_array_equal(row, logits(lm.backend, Tree(path), np.array([len(path) - 1]), features)[0])


def test_forced_and_suppressed_tokens_hold(pair):
    model, lm = pair()
    plain, _ = of_transformers(model, sound(), max_new_tokens=10)
    settings = {"suppress_tokens": plain[0][2:4], "begin_suppress_tokens": plain[0][:1], "forced_eos_token_id": EOS}
    lm = replace(lm, generation_defaults=GenerationDefaults(settings))
    for options in ({"max_new_tokens": 10}, {"max_new_tokens": 10, "num_beams": 3, "num_return_sequences": 3}):
        expected, _ = of_transformers(model, sound(), **options, **settings)
        assert expected[0][0] != plain[0][0]
        for (tokens, _), theirs in zip(run(lm, [sound()], options)[0], expected, strict=True):
            assert tokens == theirs[: len(tokens)]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 3}], ids=["1", "3"])
def test_generate_of_transformers_takes_specbeam(pair, options):
    model, _ = pair()
    sounds = torch.tensor(np.stack([sound(i) for i in range(3)]))
    options = {"max_new_tokens": 16, "suppress_tokens": [5, 6], "begin_suppress_tokens": [7], **options}
    expected = model.generate(sounds, **options).tolist()
    for draft in ({}, {"draft": "ngram"}):
        assert model.generate(sounds, custom_generate=hf.generate, **draft, **options).tolist() == expected


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["1", "3"])
def test_generate_of_transformers_takes_specbeam_with_timestamps(options):
    """The vocabulary has 32 timestamps."""
    for seed in range(3 if in_thorough_mode() else 1):
        model = random_whisper(seed, vocab_size=300)
        settings = {"no_timestamps_token_id": 267, "max_initial_timestamp_index": 10, "return_timestamps": True}
        for name, value in settings.items():
            setattr(model.generation_config, name, value)
        sounds = torch.tensor(np.stack([sound(i) for i in range(3)]))
        options = {"max_new_tokens": 16, "return_timestamps": True, **options}
        expected = model.generate(sounds, **options).tolist()
        assert all(any(token > 267 for token in tokens) for tokens in expected)
        for draft in ({}, {"draft": "ngram"}):
            assert model.generate(sounds, custom_generate=hf.generate, **draft, **options).tolist() == expected


def test_a_model_of_transformers_reads_the_same_features(pair, save):
    model, lm = pair()
    sounds, options = [sound(i) for i in range(3)], {"max_new_tokens": 16, "num_beams": 3, "num_return_sequences": 3}
    expected = run(lm, sounds, options)
    loaded = specbeam.load(save(model, byte_tokenizer()), backend="transformers", device="cpu")
    for other in (hf.wrap(model), loaded):
        for ours, theirs in zip(expected, run(other, sounds, options, draft="ngram"), strict=True):
            assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
            assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_of_attention_are_those_of_transformers(pair, shape, backend):
    """Of a tree in three passes: a prefix, and two branches of which the last layer needs one node each."""
    model, lm = pair(backend=backend, **SHAPES[shape], attn_implementation="eager")
    positions = model.config.max_source_positions
    features, lm = sound(positions=positions), lm.backend
    tokens = [START, *range(12)]
    with torch.no_grad():
        expected = model(
            torch.tensor(features)[None], decoder_input_ids=torch.tensor([tokens]), output_attentions=True
        ).cross_attentions
    layers, heads = lm.cross_heads
    assert (layers, heads) == (len(expected), expected[0].shape[1])
    watched = [(layer, head) for layer in reversed(range(layers)) for head in range(heads)]
    source, kept = placed(lm, features)
    for shown in (positions, positions - 7):
        watch = AttentionProbe(watched, np.full((len(watched), len(tokens) + 2, shown), np.nan, np.float32))
        slots = Slots(Tree(tokens), lm)
        for part in (slice(0, 5), slice(5, 6), slice(6, 13)):
            nodes = np.arange(13)[part]
            segment = slots.tree_batch(slots.prepare(nodes), np.arange(len(nodes)), source=source)
            segment.probe = watch
            lm.forward([segment])
        assert np.isnan(watch.scores[:, 13:]).all()
        for (layer, head), scores in zip(watched, watch.scores[:, :13], strict=True):
            theirs = expected[layer][0, head, :, :shown]
            weights = torch.tensor(scores).softmax(-1)
            np.testing.assert_allclose(weights, theirs / theirs.sum(-1, keepdims=True), atol=2e-5)
        slots.close()
    kept.close()


def test_scores_of_attention_change_no_bit_and_have_none_of_the_batch(pair):
    _, lm = pair(quantize="int8")
    backend, (source, kept) = lm.backend, placed(lm.backend, sound())

    def run(watched, parts, together):
        trees = [Slots(Tree([START, *range(first, first + 9)]), backend) for first in (0, 20)][: 1 + together]
        watches = [AttentionProbe(((1, 2), (2, 3)), np.zeros((2, 10, POSITIONS), np.float32)) for _ in trees]
        found = []
        for part in parts:
            nodes = np.arange(10)[part]
            segments = [slots.tree_batch(slots.prepare(nodes), np.arange(len(nodes)), source=source) for slots in trees]
            for segment, watch in zip(segments, watches, strict=True):
                segment.probe = watch if watched else None
            found.append(backend.forward(segments)[: len(nodes)])
        for slots in trees:
            slots.close()
        return np.concatenate(found), watches[0].scores

    plain, _ = run(False, [slice(0, 10)], False)
    _, scores = run(True, [slice(0, 10)], False)
    assert np.ptp(scores, axis=2).min() > 0
    for parts in ([slice(0, 10)], [slice(0, 3), slice(3, 10)]):
        for together in (False, True):
            logits_of_first, again = run(True, parts, together)
            np.testing.assert_array_equal(logits_of_first, plain)
            np.testing.assert_array_equal(again, scores)
    kept.close()


def test_kernels_refuse_heads_that_are_not_there(pair):
    backend = pair()[1].backend
    source, kept = placed(backend, sound())
    slots = Slots(Tree([START, 1]), backend)
    segment = slots.tree_batch(slots.prepare(np.arange(2)), np.arange(2), source=source)
    scores = np.zeros((1, 2, POSITIONS), np.float32)
    for heads, room, says in (
        ([(3, 0)], scores, "head is not in the model"),
        ([(0, -1)], scores, "head is not in the model"),
        ([(0, 4)], scores, "head is not in the model"),
        ([(0, 0)], scores[:, :1], "no row for a position"),
        ([(0, 0)], np.zeros((1, 2, POSITIONS + 1), np.float32), "more positions than the source"),
        ([(0, 0)], np.zeros((1, 2, 0), np.float32), "heads are missing"),
        ([(0, 0), (0, 1)], scores, "no array of float32 for each head"),
        ([(0, 0)], scores.astype(np.float64), "no array of float32 for each head"),
        ([(0, 0)], scores[:, :, ::2], "no array of float32 for each head"),
    ):
        segment.probe = AttentionProbe(heads, room)
        with pytest.raises(RuntimeError, match=says):
            backend.forward([segment])
    kept.close()


def test_what_cannot_be_is_one_line(pair, tiny, save):
    _, lm = pair()
    engine = Engine(lm)
    shape = rf"\[{BANDS}, {2 * POSITIONS}\]"
    for features, says in (
        (None, f"reads audio features {shape}, and there are none: give log-mel features"),
        (sound(positions=7), rf"have the shape \[8, 14\], but .* reads audio features {shape}"),
        (sound()[None], r"have the shape \[1, 8, 60\]"),
        (sound() * np.nan, "hold NaN or infinity"),
        ("hello", "no array of numbers"),
    ):
        with pytest.raises(SpecbeamError, match=says):
            engine.submit(PROMPT, features=features)
    with pytest.raises(SpecbeamError, match="reads no audio: leave out the features"):
        Engine(tiny()[1]).submit([1, 2], features=sound())
    with pytest.raises(SpecbeamError, match=r"reads no audio and .* give a draft that reads the same audio"):
        engine.submit(PROMPT, features=sound(), draft=tiny()[1])
    with pytest.raises(SpecbeamError, match="context of 64"):
        engine.submit([START] * 64, features=sound())
    with pytest.raises(RuntimeError, match="another shape than the encoder reads"):
        states_of(lm.backend, sound(positions=7))
    folder = save(random_whisper(), byte_tokenizer())
    rewrite(folder, "config.json", decoder_attention_heads=5)
    with pytest.raises(SpecbeamError, match="no multiple of its 5 heads"):
        specbeam.load(folder, backend="cpu")
    rewrite(folder, "config.json", decoder_attention_heads=4, num_mel_bins=9)
    with pytest.raises(SpecbeamError, match=r"conv1.weight has shape \[32, 24\], .* asks for \[32, 27\]"):
        specbeam.load(folder, backend="cpu")


def test_kernels_refuse_sources_that_are_not_there(pair):
    backend = pair()[1].backend
    source, kept = placed(backend, sound())
    slots = Slots(Tree([START, 1]), backend)
    pending = slots.prepare(np.arange(2))
    for wrong in (None, source[::-1], np.r_[source[:-1], 10**6], np.r_[source, source[-1:] + 99]):
        with pytest.raises(RuntimeError, match="source"):
            backend.forward([slots.tree_batch(pending, np.arange(2), source=wrong)])
    for wrong in (source * 0, source + 10**6):
        with pytest.raises(RuntimeError, match=r"same slot|not in the cache"):
            backend.place([states_of(backend, sound())], [wrong])
    kept.close()


def with_values_of(checkpoint, model):
    """The model, with the values that a checkpoint of CTranslate2 stands for."""
    state, whisper = model.state_dict(), ARCHITECTURES["whisper"]
    for parameter in parameters(checkpoint.config):
        (source,) = checkpoint.sources(parameter)
        rows = checkpoint.read(source, 0, checkpoint.shape(source)[0])
        names = tensor_names(parameter, whisper.folder_tensors)
        for name, part in zip(names, np.split(rows, len(names)), strict=True):
            if name in state:
                into = state[name]
                part = part.reshape(into.shape[0], into.shape[2], -1).swapaxes(1, 2) if into.ndim == 3 else part
                into.copy_(torch.tensor(part))
    return model


def whisper_base():
    """Whisper base as CTranslate2 has it, and as transformers runs it with the same weights."""
    folder = reference_folder("whisper-base")
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    encoder = config.encoder
    (attention, _, mlp), (of_encoder, mlp_of_encoder) = config.layers[0], encoder.layers[0]
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            **{"vocab_size": config.vocab_size, "d_model": config.hidden_size, "num_mel_bins": encoder.stem.bands},
            **{"encoder_layers": encoder.num_layers, "encoder_attention_heads": of_encoder.num_heads},
            **{"decoder_layers": config.num_layers, "decoder_attention_heads": attention.num_heads},
            **{"encoder_ffn_dim": mlp_of_encoder.intermediate_size, "decoder_ffn_dim": mlp.intermediate_size},
            **{"eos_token_id": 50257, "pad_token_id": 50257, "bos_token_id": 50257, "decoder_start_token_id": 50258},
            begin_suppress_tokens=None,
        )
    ).eval()
    return folder, with_values_of(checkpoint, model)


def test_whisper_base_writes_what_transformers_writes():
    av = pytest.importorskip("av")
    sounds = Path(__file__).parents[3] / "shared/data/audio/jfk.flac"
    if not sounds.is_file():
        pytest.skip(f"there is no {sounds}")
    folder, model = whisper_base()
    lm = specbeam.load(folder, dtype="float32")
    features = WhisperFeatureExtractor()(samples(av, sounds), sampling_rate=16_000).input_features[0]
    with torch.no_grad():
        states = model.model.encoder(torch.tensor(features)[None]).last_hidden_state[0].numpy()
    distance = np.abs(states_of(lm.backend, features) - states)  # states are up to 24; both are 5e-4 off in float32
    assert np.quantile(distance, 0.999) < 1e-4
    assert distance.max() < 2e-3
    names = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
    prompt = [lm.tokenizer.get_vocab()[name] for name in names]
    own = {name: value for name, value in lm.generation_defaults.items() if name != "alignment_heads"}
    for beams in (1, 5) if in_thorough_mode() else (3,):
        options = {"max_new_tokens": 100} | ({"num_beams": beams, "num_return_sequences": beams} if beams > 1 else {})
        expected, scores = of_transformers(model, features, prompt, **options, **own)
        ((first, *others),) = run(lm, [features], options, prompt)
        assert "ask what you can do for your country" in lm.decode(first[0])
        for (tokens, score), theirs, of_theirs in zip((first, *others), expected, scores, strict=True):
            assert tokens == theirs[: len(tokens)]
            assert beams == 1 or score == pytest.approx(of_theirs, abs=1e-4)


def samples(av, file):
    """The audio in a file, float32 [n] at 16 kHz."""
    resampler = av.AudioResampler(format="s16", layout="mono", rate=16_000)
    with av.open(str(file)) as opened:
        frames = [part for frame in (*opened.decode(audio=0), None) for part in resampler.resample(frame)]
    return np.concatenate([frame.to_ndarray()[0] for frame in frames]).astype(np.float32) / 2**15
