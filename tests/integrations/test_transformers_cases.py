"""Calls of ``generate`` as transformers' own tests make them, drawn by a seed: each with and without specbeam."""

import copy
import random
from functools import cache

import pytest
import torch
import transformers

from specbeam import hf
from specbeam.backends.transformers.compat import CACHE
from tests.conftest import in_thorough_mode
from tests.integrations.test_transformers_steps import Kept, check_scores

VOCAB, PAD = 40, 0
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.4}
SIZES |= {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 1}
OLD_SIZES = SIZES | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
LIKE_LLAMA = "Llama Qwen2 Phi Phi3 StableLm Starcoder2 Granite Olmo2 Cohere GPTNeoX"
HAS_OLD_SIZES = ("GPT2", "GPTJ", "CodeGen")
TAKES_TOKEN_TYPES = ("GPT2",)
HAS_WINDOW = ("Gemma2", "Gemma3", "Mistral")
DECODERS = {name: {} for name in (*LIKE_LLAMA.split(), *HAS_OLD_SIZES)} | {
    "Qwen2Moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4},
    "Qwen3": {"head_dim": 8},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 6},
    "Gemma3": {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 6},
    "Mistral": {"sliding_window": 6},
    "Mixtral": {"num_local_experts": 4},
    "Falcon": {"new_decoder_architecture": True, "alibi": False},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}
PROCESSORS = {
    "bad_words_ids": [[5], [7, 8]],
    "suppress_tokens": [4, 12],
    "forced_eos_token_id": 9,
    "remove_invalid_values": True,
    "sequence_bias": {(4,): 2.0, (9, 10): -3.0},
    "pad_token_id": 3,
}
STACK = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
ENCODERS = {
    "T5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "initializer_factor": 3.0},
    "Bart": {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in STACK.items()}
    | {"d_model": 32, "init_std": 0.4},
}
FAMILIES = [*DECODERS, *ENCODERS]
CASES_PER_FAMILY = 25 if in_thorough_mode() else 3


@cache
def model_of(family, seed=0):
    torch.manual_seed(seed)
    if family in ENCODERS:
        kind = f"{family}ForConditionalGeneration"
        sizes = {name: SIZES[name] for name in ("vocab_size", "pad_token_id", "eos_token_id")} | ENCODERS[family]
        sizes["decoder_start_token_id"] = 2
        config = getattr(transformers, f"{family}Config")(**sizes)
    else:
        kind = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
        name = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
        config = getattr(transformers, name)(**(OLD_SIZES if family in HAS_OLD_SIZES else SIZES) | DECODERS[family])
        if family == "Gemma2":
            config._attn_implementation = "eager"
    model = getattr(transformers, kind)(config).eval()
    model.generation_config.forced_eos_token_id = None
    return model


def draw_prompt(draw, family, model, options):
    """The prompt in one of the forms that ``generate`` takes, and further arguments."""
    rows, length = draw.choice([1, 1, 2, 3]), draw.randint(1, 9)
    ids = torch.tensor([[draw.randrange(3, VOCAB) for _ in range(length)] for _ in range(rows)])
    # Without a mask, transformers hides pad_token_id=3. The last token must be seen, and with a window all tokens.
    ids[:, 0 if family in HAS_WINDOW else -1 :].clamp_(min=4)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : draw.choice([0, 0, draw.randrange(length)])] = 0
    if family in ENCODERS:
        form = draw.choice(["ids", "ids", "encoded", "embeddings"])
        if form == "encoded":
            with torch.no_grad():
                states = model.get_encoder()(ids, attention_mask=mask).last_hidden_state
            encoded = transformers.modeling_outputs.BaseModelOutput(states)
            return {"encoder_outputs": encoded, "attention_mask": mask}
        if form == "embeddings":
            return {"inputs_embeds": model.get_encoder().embed_tokens(ids).detach() * 1.1, "attention_mask": mask}
        return {"input_ids": ids, "attention_mask": mask}
    forms = ["ids", "ids", "padded", "positions", "embeddings", "both"]
    forms += [] if family in HAS_WINDOW else ["holes"]
    forms += ["types"] if family in TAKES_TOKEN_TYPES else []
    forms += ["cache", "continued"] if options.get("num_beams", 1) == 1 else []
    form = draw.choice(forms)
    given = {"input_ids": ids}
    if form == "holes":
        for row in range(rows):
            mask[row, draw.randrange(length)] = 0
        mask[:, -1] = 1
    if form in ("padded", "holes", "positions", "types"):
        given["attention_mask"] = mask
    if form == "positions":
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    if form == "types":
        given["token_type_ids"] = torch.tensor([[draw.randrange(2) for _ in range(length)] for _ in range(rows)])
    if form in ("embeddings", "both"):
        given["inputs_embeds"] = model.get_input_embeddings()(ids).detach() * 1.1
        if form == "embeddings":
            del given["input_ids"]
    if form == "cache":
        static = transformers.StaticCache(config=model.config, max_cache_len=40)
        given[CACHE] = draw.choice([transformers.DynamicCache(config=model.config), static])
    if form == "continued":
        past = transformers.DynamicCache(config=model.config)
        begun = model.generate(ids, max_new_tokens=3, **{CACHE: past})
        count = draw.randint(0, 3)
        more = torch.tensor([draw.randrange(3, VOCAB) for _ in range(rows * count)], dtype=torch.long)
        whole = torch.cat([begun, more.view(rows, count)], dim=1)
        new = whole.shape[1] - past.get_seq_length()
        given |= {CACHE: past, "attention_mask": torch.ones_like(whole)}
        given["input_ids"] = whole if draw.random() < 0.5 else whole[:, -new:]
    return given


def draw_options(draw, family):
    options = {"max_new_tokens": draw.randint(1, 10), "eos_token_id": draw.choice([1, [1, 5], [3, 7, 9, 11], -1])}
    if draw.random() < 0.5:
        options["num_beams"] = draw.randint(2, 4)
        options["num_return_sequences"] = draw.randint(1, options["num_beams"])
        options["early_stopping"] = draw.choice([False, True, "never"])
        options["length_penalty"] = draw.choice([1.0, 0.0, 2.0, -1.0])
    if draw.random() < 0.6:
        options |= {"return_dict_in_generate": True, "output_scores": draw.random() < 0.5}
        options["output_logits"] = "num_beams" not in options and draw.random() < 0.5
    else:
        options["output_attentions"] = draw.random() < 0.2 and family != "Falcon"  # its attention loses its mask then
        options["output_hidden_states"] = options["output_attentions"]
    if draw.random() < 0.3:
        options["repetition_penalty"] = 1.4
    if draw.random() < 0.3:
        options["no_repeat_ngram_size"] = 2
    if draw.random() < 0.3:
        options["min_new_tokens"] = draw.randint(1, options["max_new_tokens"])
    few = draw.sample(sorted(PROCESSORS), draw.choice([0, 0, 1, 2, 3]))
    options |= {name: PROCESSORS[name] for name in few}
    if "forced_eos_token_id" in few and "num_return_sequences" in options:
        options["num_return_sequences"] = 1  # else fewer texts may be possible, and transformers forbidden ones
    if draw.random() < 0.2:
        options["logits_processor"] = [lambda ids, scores: scores + (torch.arange(VOCAB) % 3)]
    if draw.random() < 0.2 and options["eos_token_id"] != -1:
        options["stopping_criteria"] = [lambda ids, scores: ids[:, -1:].sum(-1) % 7 == 2]
    return options


def compare(model, expected, got, rows):
    """Compare outputs of ``generate``, up to the end of each text."""
    if isinstance(expected, torch.Tensor):
        assert (got.dtype, got.tolist()) == (expected.dtype, expected.tolist())
        return
    assert type(got) is type(expected)
    assert got.sequences.tolist() == expected.sequences.tolist()
    with_beams = hasattr(expected, "beam_indices")
    differing = {*expected.keys()} ^ {*got.keys()}
    assert differing <= ({CACHE} if with_beams else set())
    if with_beams:
        assert got.beam_indices.tolist() == expected.beam_indices.tolist()
        if expected.sequences_scores is not None:
            torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-5)
    if expected.scores is not None:
        check_scores(model, got, expected)
    if (theirs := getattr(expected, "logits", None)) is not None:
        assert len(got.logits) == len(theirs)
        for step in range(len(theirs)) if rows == 1 else [0]:  # later, some texts may have ended
            torch.testing.assert_close(got.logits[step], theirs[step], atol=1e-4, rtol=1e-4)
    if (cached := getattr(expected, CACHE, None)) is not None and not with_beams:
        compare_caches(cached, got[CACHE], rows)


def compare_caches(expected, got, rows):
    assert type(got) is type(expected)
    assert int(got.get_seq_length()) == int(expected.get_seq_length())
    if rows > 1:  # a text that has ended goes on with padding, which is not read
        return
    if isinstance(expected, transformers.EncoderDecoderCache):
        compare_caches(expected.self_attention_cache, got.self_attention_cache, rows)
        expected, got = expected.cross_attention_cache, got.cross_attention_cache
    for theirs, ours in zip(expected.layers, got.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(CASES_PER_FAMILY))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_returns_what_transformers_returns(family, seed):
    draw = random.Random(f"{family} {seed}")
    model = model_of(family)
    options = draw_options(draw, family)
    given = draw_prompt(draw, family, model, options)
    rows = len(next(value for value in given.values() if isinstance(value, torch.Tensor)))
    streams = "num_beams" not in options and draw.random() < 0.3

    def generate(**more):
        own, streamer = copy.deepcopy(given), Kept()
        torch.manual_seed(0)
        out = model.generate(**own, **options, streamer=streamer if streams else None, **more)
        return out, own.get(CACHE), streamer.got

    expected, cached, streamed = generate()
    drafts = [None]
    if draw.random() < 0.3:
        knows_ids = family in DECODERS or "input_ids" in given
        drafts.append(draw.choice(["ngram", model_of(family, 1)] if knows_ids else ["ngram", "suffix"]))
    for draft in drafts:
        got, filled, tokens = generate(custom_generate=hf.generate, draft=draft)
        compare(model, expected, got, rows)
        if cached is not None:
            compare_caches(cached, filled, rows)
        assert tokens == streamed
