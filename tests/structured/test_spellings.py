"""As many beams as there are texts: all of them come, though a tokenizer spells each in several ways."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import specbeam
from specbeam import Choice, Grammar, JsonSchema, Regex
from tests.conftest import examples, fast_tokenizer, random_model, run_alone
from tests.structured.test_ends import union
from tests.structured.test_schemas import written


def merging_tokenizer():
    """Bytes, and some pairs of the letters a, b and c."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("a", "b"), ("b", "a"), ("c", "a"), ("ab", "ab"), ("b", "c"), ('"', "a")]
    vocab = {text: number for number, text in enumerate([*alphabet, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<e>"])
    return fast_tokenizer(tokenizer, eos_token="<e>")


@pytest.fixture(scope="module")
def merging(save):
    size = 256 + 7
    model = random_model("llama", vocab_size=size, eos_token_id=size - 1, bos_token_id=0)
    return specbeam.load(save(model, merging_tokenizer()), device="cpu", dtype="float32")


KINDS = {
    "an expression": (lambda texts: Regex(union(texts)), str),
    "a grammar": (lambda texts: Grammar("root ::= " + " | ".join(f'"{text}"' for text in texts)), str),
    "an enum": (lambda texts: JsonSchema({"enum": [*texts]}), written),
    "an object": (lambda texts: JsonSchema({"type": "array", "items": {"enum": texts}, "minItems": 1, "maxItems": 1}),
                  lambda text: written([text])),
}  # fmt: skip


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(0.5))
@given(texts=st.lists(st.text("abc", min_size=1, max_size=8), min_size=2, max_size=6, unique=True))
def test_all_texts_come_as_of_a_list(merging, kind, draft, texts):
    describe, written = KINDS[kind]
    options = {"num_beams": len(texts), "num_return_sequences": len(texts), "max_new_tokens": 20}
    found = run_alone(merging, "a b c", options | {"constraint": describe(texts)}, draft).sequences
    assert {one.text for one in found} == {*map(written, texts)}
    assert all(one.is_complete for one in found)
    listed = Choice(tuple(map(written, texts)))
    assert found == run_alone(merging, "a b c", options | {"constraint": listed}, draft).sequences


def test_fewer_texts_are_said(merging, caplog):
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 9, "constraint": Regex("ab|b")}
    with caplog.at_level(logging.WARNING, "specbeam"):
        assert len(run_alone(merging, "a", options).sequences) == 2
    (record,) = caplog.records
    assert "4 texts were asked for, and 2 came" in record.getMessage()
    caplog.clear()
    run_alone(merging, "a", options | {"num_return_sequences": 2})
    assert not caplog.records


def test_names_of_control_tokens_stay_texts(merging):
    options = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 12, "constraint": Regex("<e>|ab")}
    assert {one.text for one in run_alone(merging, "a", options).sequences} <= {"<e>", "ab"}
    assert specbeam.Regex("a?").listed(merging) is None
    assert specbeam.Regex("[a-z]{9}").listed(merging) is None
