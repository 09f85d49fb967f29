"""Prompts and caches in ``model.generate``: specbeam reads, fills and continues them as transformers does."""

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from specbeam import SpecbeamError
from specbeam.backends.transformers.compat import CACHE
from tests.conftest import random_model
from tests.integrations.conftest import EXTRA, assert_same, both

IDS = torch.tensor([[3, 5, 7, 9, 11, 13, 15]])


@pytest.fixture(scope="module")
def bart():
    torch.manual_seed(0)
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    small = {"d_model": 16, "encoder_ffn_dim": 4, "decoder_ffn_dim": 4, "max_position_embeddings": 20, "vocab_size": 99}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, **small, init_std=0.5)).eval()


def test_a_prompt_may_take_several_passes(model):
    prompts = torch.arange(2 * 700).view(2, -1) % 17 + 3
    expected, got = both(model, prompts, max_new_tokens=4, eos_token_id=-1, return_dict_in_generate=True)
    assert got.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in zip(got[CACHE].layers, expected[CACHE].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_conversation_goes_on_from_the_callers_cache(model, kind, is_whole):
    def turns(**how):
        cache = kind(config=model.config, **({"max_cache_len": 40} if kind is StaticCache else {}))
        first = model.generate(IDS, max_new_tokens=4, **{CACHE: cache}, **how)
        cached = int(cache.get_seq_length())
        whole = torch.cat([first, torch.tensor([[17, 19]])], dim=1)
        given = whole if is_whole else whole[:, cached:]
        mask = torch.ones_like(whole)
        second = model.generate(given, attention_mask=mask, max_new_tokens=5, **{CACHE: cache}, **how)
        return cached, second.tolist(), int(cache.get_seq_length())

    assert turns(**EXTRA) == turns() == turns(**EXTRA, draft="ngram")


def test_rotated_positions_have_no_end():
    model = random_model("llama", max_position_embeddings=20)
    for length, new, beams in (7, 30, 1), (7, 30, 3), (25, 5, 1):
        options = {"max_new_tokens": new, "num_beams": beams, "eos_token_id": -1}
        assert assert_same(model, torch.arange(length)[None], **options).shape[1] == length + new


@pytest.mark.parametrize("num_beams", [1, 3])
def test_learned_positions_end_as_in_transformers(num_beams):
    model = random_model("gpt2", n_positions=20, max_position_embeddings=20)
    options = {"eos_token_id": -1, "num_beams": num_beams}
    assert assert_same(model, IDS, max_new_tokens=14, **options).shape == (1, 21)
    says = "a text of 22 tokens was asked for, and GPT2LMHeadModel has positions for 21"
    with pytest.raises(SpecbeamError, match=says):
        model.generate(IDS, max_new_tokens=15, **options, **EXTRA)


def test_beams_fill_the_learned_positions_of_a_decoder(bart):
    assert_same(bart, IDS, num_beams=4, max_length=20)


def test_each_row_has_its_own_encoder_output(bart):
    states = bart.get_encoder()(torch.cat([IDS, IDS.flip(1)])).last_hidden_state.detach()
    one, other = assert_same(bart, IDS[[0, 0]], encoder_outputs=BaseModelOutput(states), max_length=12).tolist()
    assert one != other


@pytest.mark.parametrize("ids", [torch.zeros(1, 1).long(), None])
def test_encoder_outputs_may_have_any_length(bart, ids):
    states = bart.get_encoder()(IDS).last_hidden_state.detach()
    expected, got = (  # transformers expands the states in place, so each call gets its own
        bart.generate(ids, encoder_outputs=BaseModelOutput(states), num_beams=3, max_length=12, **how)
        for how in ({}, EXTRA)
    )
    assert got.tolist() == expected.tolist()


def test_with_beams_scores_of_texts_are_returned_with_output_scores_only_and_there_is_no_cache(model):
    for output_scores in (False, True):
        options = {"num_beams": 2, "return_dict_in_generate": True, "output_scores": output_scores}
        expected, got = both(model, IDS, max_new_tokens=4, **options)
        assert (got.sequences_scores is None) == (expected.sequences_scores is None) == (not output_scores)
        assert got.get(CACHE) is None


def test_prompts_that_cannot_be_read_are_refused_by_name(models, model):
    mask = torch.ones_like(IDS)
    mask[0, 2] = 0
    with pytest.raises(SpecbeamError, match="hides tokens inside a prompt, with a sliding window"):
        models("mistral").generate(IDS, attention_mask=mask, max_new_tokens=3, **EXTRA)
    full = model.generate(IDS, max_new_tokens=4, return_dict_in_generate=True)[CACHE]
    with pytest.raises(SpecbeamError, match=f"{CACHE} with as many tokens as the prompt"):
        model.generate(IDS, **{CACHE: full}, max_new_tokens=3, **EXTRA)
    config = transformers.BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2)
    bloom = transformers.BloomForCausalLM(config).eval()
    with pytest.raises(SpecbeamError, match=r"BloomForCausalLM cannot be evaluated .*: it takes no position_ids"):
        bloom.generate(IDS, max_new_tokens=3, **EXTRA)
