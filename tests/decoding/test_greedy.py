"""Where sequences end, and the statistics of a request."""

import math

import pytest

import specbeam
from specbeam.core.tree import Tree
from specbeam.logits.stopping import Stopping
from tests.conftest import EOS


@pytest.mark.parametrize("num_beams", [1, 3])
def test_text_ends_before_a_stop_string_and_as_soon_as_it_is_there(lm, num_beams):
    options = {"num_beams": num_beams, "max_new_tokens": 30}
    whole = specbeam.generate(lm, "abc", **options).text
    stop = whole[10:13]
    options |= {"num_return_sequences": num_beams, "stop_strings": [stop, "never there"]}
    sequences = specbeam.generate(lm, "abc", **options).sequences
    assert "stop" in {sequence.finish_reason for sequence in sequences}
    for sequence in sequences:
        text = lm.decode(sequence.token_ids)
        assert sequence.text == text.partition(stop)[0]
        assert (stop in text) == (sequence.finish_reason == "stop")
        assert stop not in lm.decode(sequence.token_ids[:-1])
    if num_beams == 1:
        assert sequences[0].text == whole[: whole.index(stop)]


def test_special_tokens_are_part_of_the_text_that_stop_strings_are_looked_for_in(lm):
    tree = Tree([1])
    node = tree.tip
    for token in [*lm.tokenizer("STO").input_ids, *[EOS] * 40, *lm.tokenizer("P").input_ids]:
        (node,) = tree.add(node, token).tolist()
    for text, ends in (("STOP", None), ("<eos>P", "stop"), ("O" + "<eos>" * 40 + "P", "stop")):
        stop = Stopping(frozenset(), 1000, (text,), lm.decode)
        assert stop(tree, node) == ends
        assert stop(tree, tree.parents(node)) is None


def test_the_context_ends_a_sequence(tiny):
    _, lm = tiny("llama", max_position_embeddings=32)
    result = specbeam.generate(lm, [7] * 20, max_new_tokens=100, eos_token_id=EOS, min_new_tokens=100)
    assert len(result.token_ids) == 12
    assert result.finish_reason == "length"


def test_statistics(lm):
    stats = specbeam.generate(lm, [1, 2, 3, 4], max_new_tokens=10, min_new_tokens=10).stats
    assert (stats.prompt_tokens, stats.new_tokens, stats.forward_passes) == (4, 10, 10)
    assert 0 < stats.time_to_first_token < stats.seconds
    assert math.isclose(stats.tokens_per_second, 10 / stats.seconds)
    assert stats.peak_memory > 1 << 20
