"""Models with an encoder, against transformers' own generation."""

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
    T5Config,
    UMT5Config,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import specbeam
from specbeam import Engine, SpecbeamError, hf
from specbeam.cache.slots import Slots
from specbeam.tree import Tree
from tests.conftest import EOS, beams_of_transformers, examples, random_model

PAD, START = 258, 256
SIZES = {"vocab_size": 259, "pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": START}
BART = SIZES | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "init_std": 0.4,
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


@pytest.fixture(scope="module")
def pair():
    made = {}

    def pair(kind, attention="sdpa"):
        if (kind, attention) not in made:
            model = make(kind, attention=attention)
            made[kind, attention] = model, hf.wrap(model)
        return made[kind, attention]

    return pair


# Positions reach the decoder in three ways: biases (T5), counted embeddings (BART), embeddings by ids (M2M100).
ONE_PER_KIND_OF_POSITIONS = ("t5", "bart", "m2m100")


def quick(*kinds):
    """All kinds of models; the others are left to thorough mode."""
    return [kind if kind in kinds else pytest.param(kind, marks=pytest.mark.thorough) for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_equal_the_texts_of_transformers(pair, kind):
    check_texts(*pair(kind))


@pytest.mark.parametrize("kind", quick(*ONE_PER_KIND_OF_POSITIONS))
def test_texts_with_eager_attention_equal_the_texts_of_transformers(pair, kind):
    check_texts(*pair(kind, "eager"))


def check_texts(model, lm):
    for prompt in PROMPTS:
        (expected,), _ = beams_of_transformers(model, prompt, max_new_tokens=20)
        assert specbeam.generate(lm, prompt, max_new_tokens=20).token_ids == expected
        options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 20, "length_penalty": 0.8}
        expected, scores = beams_of_transformers(model, prompt, **options)
        for got, tokens, score in zip(
            specbeam.generate(lm, prompt, **options).sequences, expected, scores, strict=True
        ):
            assert got.token_ids == tokens[: len(got.token_ids)]
            assert got.score == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("kind", quick(*ONE_PER_KIND_OF_POSITIONS))
def test_drafts_and_batches_change_nothing(pair, kind):
    _, lm = pair(kind)
    near = hf.wrap(make(kind, seed=1))
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 16}
    alone = [[s.token_ids for s in specbeam.generate(lm, prompt, **options).sequences] for prompt in PROMPTS]
    for draft in (None, "ngram", "suffix", near, lm):
        engine = Engine(lm)
        sizes = {} if draft is None else {"num_draft_tokens": 4, "draft_width": 6}
        requests = [engine.submit(prompt, options | sizes, draft=draft) for prompt in PROMPTS]
        engine.run()
        results = [request.result() for request in requests]
        assert [[s.token_ids for s in result.sequences] for result in results] == alone
        if draft is lm:
            assert all(r.stats.steps_per_target_pass > 1.5 for r in results)


@pytest.mark.parametrize("kind", KINDS)
def test_the_encoder_reads_prompts_together(pair, kind):
    """Each gets what transformers' encoder gives for it alone, and calls have little padding."""
    model, lm = pair(kind)
    prompts = [[2 + (n * k) % 250 for k in range(1, n)] for n in (9, 3, 12, 60, 10, 2, 12, 64, 11)]
    calls = []
    hook = model.get_encoder().register_forward_hook(lambda _, given, out: calls.append(out[0].shape))
    try:
        together = lm.backend.encode(prompts)
        assert sorted(tuple(shape[:2]) for shape in calls) == [(2, 2), (2, 63), (5, 11)]
        for prompt, source in zip(prompts, together, strict=True):
            (alone,) = lm.backend.encode([prompt])
            with torch.no_grad():
                expected = model.get_encoder()(torch.tensor([prompt])).last_hidden_state
            torch.testing.assert_close(source.states, expected, atol=1e-4, rtol=1e-5)
            for ours, theirs in zip(source.keys + source.values, alone.keys + alone.values, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)
    finally:
        hook.remove()


def test_the_encoder_reads_at_most_some_thousand_tokens_at_once(pair):
    _, lm = pair("t5")
    sizes = []
    encoder = lm.backend.model.get_encoder()
    hook = encoder.register_forward_hook(lambda _, given, out: sizes.append(out[0].shape[0] * out[0].shape[1]))
    try:
        sources = lm.backend.encode([[5] * 1000] * 20 + [[5]])
    finally:
        hook.remove()
    assert sorted(sizes) == [1, 4000, 8000, 8000]
    assert [source.states.shape[1] for source in sources] == [1000] * 20 + [1]


@settings(max_examples=examples(0.5))
@given(st.data())
@pytest.mark.parametrize("kind", ["t5", "umt5", "bart", "m2m100"])
def test_a_tree_at_once_is_each_sequence_alone(pair, kind, data):
    """Against transformers' decoder, which is given each sequence by itself."""
    model, lm = pair(kind)
    prompt = PROMPTS[data.draw(st.integers(0, 2))]
    tree = Tree([START])
    slots = Slots(tree, lm.backend)
    (source,) = lm.backend.encode([prompt])
    nodes = [tree.tip]
    for _ in range(data.draw(st.integers(1, 3))):
        parents = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=4))
        tokens = data.draw(
            st.lists(st.integers(2, 255), min_size=len(parents), max_size=len(parents))
        )  # 1 is M2M100's padding
        nodes += tree.add(parents, tokens).tolist()
        wanted = np.array(sorted(data.draw(st.sets(st.sampled_from(nodes), min_size=1))))
        pending = slots.missing(wanted)
        logits = lm.backend.forward([slots.segment(pending, np.flatnonzero(np.isin(pending, wanted)), source=source)])
        for node, row in zip(wanted.tolist(), logits, strict=True):
            sequence = torch.tensor([tree.tokens(tree.path(node)).tolist()])
            with torch.no_grad():
                expected = model(input_ids=torch.tensor([prompt]), decoder_input_ids=sequence).logits[0, -1]
            torch.testing.assert_close(row, expected, atol=2e-3, rtol=0)  # some logits are over 10


def test_the_callers_model_stays_as_it_was(pair):
    for kind in ("t5", "bart"):
        model, lm = pair(kind)
        specbeam.generate(lm, PROMPTS[0], max_new_tokens=4)
        decoder = model.get_decoder()
        assert not any("compute_bias" in vars(module) for module in decoder.modules())
        assert not any(module._forward_hooks for module in decoder.modules())


def test_what_the_checkpoint_forces_and_forbids_holds(pair):
    model = make("bart")
    plain = specbeam.generate(hf.wrap(model), PROMPTS[0], max_new_tokens=8).token_ids
    config = model.generation_config
    config.forced_bos_token_id, config.forced_eos_token_id = 77, EOS
    config.bad_words_ids, config.suppress_tokens = [[plain[0]], [plain[1], plain[2]]], [plain[3]]
    config.no_repeat_ngram_size = 2
    after_forced = specbeam.generate(hf.wrap(model), PROMPTS[0], max_new_tokens=8).token_ids[1]
    config.begin_suppress_tokens = [after_forced]
    lm = hf.wrap(model)
    (expected,), _ = beams_of_transformers(model, PROMPTS[0], max_new_tokens=8)
    got = specbeam.generate(lm, PROMPTS[0], max_new_tokens=8).token_ids
    assert got == expected
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


def test_what_cannot_be_is_one_line(pair):
    _, lm = pair("t5")
    causal = hf.wrap(random_model("llama"))
    with pytest.raises(SpecbeamError, match="begins its sequences with"):
        specbeam.generate(lm, PROMPTS[0], draft=causal)
    with pytest.raises(SpecbeamError, match="begins its sequences with"):
        specbeam.generate(causal, [1, 2], draft=lm)
    with pytest.raises(SpecbeamError, match="context of 128"):
        specbeam.generate(pair("bart")[1], [5] * 200)
    config = WhisperConfig(vocab_size=259, d_model=24, encoder_layers=1, decoder_layers=1, pad_token_id=PAD)
    with pytest.raises(SpecbeamError, match="reads input_features, not text"):
        hf.wrap(WhisperForConditionalGeneration(config).eval())
