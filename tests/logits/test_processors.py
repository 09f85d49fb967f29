"""Processors and warpers: equal to transformers', and sampling follows the softmax they leave."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers.generation import logits_process as theirs

from specbeam.backends.torch.sampling import select
from specbeam.core.selection import Noise, SelectionRequest
from specbeam.core.tree import Tree
from specbeam.errors import SpecbeamError
from specbeam.logits.checkpoint_processors import processors_of_checkpoint
from specbeam.logits.processors import Processors
from specbeam.logits.selector import Selector, warpers_of
from specbeam.options.generation_defaults import GenerationDefaults
from specbeam.options.options import Options
from tests.calls import calls_made

SCORES = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40).map(lambda x: torch.tensor(x)[None])
SHARE = st.floats(0.01, 0.99)


def scores_by(logits, **changes):
    """The scores of all tokens that a request makes of logits, [n, vocab]."""
    selection = select(logits, SelectionRequest(top=logits.shape[-1], **changes))
    return torch.zeros_like(logits).scatter(-1, torch.from_numpy(selection.tokens), torch.from_numpy(selection.scores))


@given(SCORES, st.floats(0.05, 5), st.integers(1, 50), SHARE, SHARE, SHARE)
def test_warpers_are_those_of_transformers(scores, temperature, k, top_p, min_p, typical_p):
    warpers = {
        "temperature": (temperature, theirs.TemperatureLogitsWarper),
        "top_k": (k, theirs.TopKLogitsWarper),
        "top_p": (top_p, theirs.TopPLogitsWarper),
        "min_p": (min_p, theirs.MinPLogitsWarper),
        "typical_p": (typical_p, theirs.TypicalLogitsWarper),
    }
    together = scores
    for name, (value, warper) in warpers.items():
        alone = scores_by(scores, warpers=warpers_of(Options(**{name: value})))
        torch.testing.assert_close(alone, warper(value)(None, scores))
        together = warper(value)(None, together)
    options = Options(**{name: value for name, (value, _) in warpers.items()})
    torch.testing.assert_close(scores_by(scores, warpers=warpers_of(options)), together)


TEXTS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=5)


def processed(options, prompt, texts, scores, eos=frozenset()):
    """The scores after some sequences of one tree, which may differ in length."""
    tree = Tree(prompt)
    ends = []
    for text in texts:
        node = tree.tip
        for token in text:
            (node,) = tree.add(node, token).tolist()
        ends.append(node)
    return scores_by(scores, **Processors(Options(**options), eos, scores.shape[1])(tree, ends))


@given(TEXTS, st.floats(0.1, 5), st.data())
def test_penalties_bans_and_biases_are_those_of_transformers(texts, penalty, data):
    scores = 5 * torch.randn(len(texts), 5, generator=torch.Generator().manual_seed(0))
    size = data.draw(st.integers(1, 4) | st.sampled_from([9, 2**31 - 1]))  # also longer than any sequence
    words = data.draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=8))
    bias = data.draw(st.dictionaries(st.integers(0, 4), st.floats(-5, 5), min_size=1))
    for options, processor in (
        ({"repetition_penalty": penalty}, theirs.RepetitionPenaltyLogitsProcessor(penalty)),
        ({"no_repeat_ngram_size": size}, theirs.NoRepeatNGramLogitsProcessor(size)),
        ({"bad_words_ids": words}, theirs.NoBadWordsLogitsProcessor(words, eos_token_id=[2])),
        ({"logit_bias": bias}, theirs.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])),
    ):
        got = processed(options, [3, 1], texts, scores, eos=frozenset([2]))
        for text, row, mine in zip(texts, scores, got, strict=True):
            torch.testing.assert_close(mine, processor(torch.tensor([[3, 1, *text]]), row[None].clone())[0])


@pytest.mark.parametrize("options", [{"no_repeat_ngram_size": 10**6}, {"bad_words_ids": [[0] * 10**6]}])
def test_bans_that_are_longer_than_the_sequence_cost_nothing(options):
    """Each of its tokens took some calls in each step."""
    tree = Tree([3, 1])
    process = Processors(Options(**options), frozenset(), 5)
    assert calls_made(lambda: process(tree, [tree.tip])) < 100


@given(TEXTS, st.floats(-2, 2), st.floats(-2, 2))
def test_frequency_and_presence_penalty_follow_openais_formula(texts, frequency, presence):
    """mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, with c counted without the prompt."""
    scores = torch.randn(len(texts), 5, generator=torch.Generator().manual_seed(0))
    got = processed({"frequency_penalty": frequency, "presence_penalty": presence}, [3, 1], texts, scores)
    for text, row, mine in zip(texts, scores.tolist(), got, strict=True):
        expected = [x - text.count(j) * frequency - float(j in text) * presence for j, x in enumerate(row)]
        assert mine.tolist() == pytest.approx(expected, abs=1e-5)


LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.5], np.float32)


def softmax_by_hand(logits):
    weights = np.exp(np.array(logits, dtype=np.float64))
    return weights / weights.sum()


def only(keep, logits):
    return softmax_by_hand([x if i in keep else -np.inf for i, x in enumerate(logits)])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Options(do_sample=True), softmax_by_hand(LOGITS)),
        # The tokens by probability under LOGITS / 2: 0, 7, 1, 2, 3 and others that are left out.
        (Options(temperature=2.0, top_k=6, top_p=0.9, min_p=0.3), only({0, 7, 1, 2, 3}, LOGITS / 2)),
        # The expected surprise is 1.58. Token 7's is nearest with 1.40, then 1's with 1.90. Both sum to 0.39.
        (Options(typical_p=0.35), only({7, 1}, LOGITS)),
    ],
)
def test_draws_follow_the_softmax(options, expected):
    n = 20_000
    noise = Noise(7, np.zeros(n, np.uint32), np.arange(n, dtype=np.uint32))
    selection = select(torch.tensor(LOGITS).expand(n, -1), SelectionRequest(warpers=warpers_of(options), noise=noise))
    counts = np.bincount(selection.tokens[:, 0], minlength=len(LOGITS))
    possible = expected > 0
    assert not counts[~possible].any()
    assert chisquare(counts[possible], n * expected[possible]).pvalue > 0.001


def test_rounding_differences_hardly_ever_change_a_draw():
    """Over a large vocabulary, the rounding differences between batch sizes must not add up."""
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(0)) * 3
    other = logits + 2e-5 * torch.randn(50_000, generator=torch.Generator().manual_seed(1))
    noise = Noise(2, np.zeros(100, np.uint32), np.arange(100, dtype=np.uint32))
    one, two = (select(row.expand(100, -1), SelectionRequest(noise=noise)).tokens for row in (logits, other))
    assert (one != two).sum() <= 1
    assert len(np.unique(one)) > 50


def test_a_value_of_a_checkpoint_that_transformers_refuses_is_one_line():
    with pytest.raises(SpecbeamError, match="generation_config"):  # the fuzzer found PyTorch's RuntimeError
        processors_of_checkpoint(
            GenerationDefaults({"suppress_tokens": [{"a": 5}]}), Options(), frozenset([2]), [5, 6, 7], 3, 9, 20
        )


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "presence_penalty": 0.2},
        {"no_repeat_ngram_size": 3},
        {"bad_words_ids": [[1], [2, 3, 4]]},
        {"temperature": 1.0},
    ],
)
def test_few_tokens_of_a_sequence_are_looked_at_again(options):
    """Counts the tokens that the tree is asked for, at 50 and at 500 tokens."""

    class Watched(Tree):
        asked = 0

        def tokens(self, nodes):
            self.asked += np.size(nodes)
            return super().tokens(nodes)

        def last_tokens(self, nodes, count):
            self.asked += len(nodes) * count
            return super().last_tokens(nodes, count)

    options = Options(**options)
    selector = Selector(Processors(options, frozenset(), 300), warpers_of(options), seed=1)
    tree, work = Watched([5, 6, 7]), []
    for step in range(500):
        before = tree.asked
        nodes = np.array([tree.tip])
        selector(tree, nodes, streams=selector.streams(tree, nodes))
        work.append(tree.asked - before)
        tree.keep(tree.append(tree.tip, step % 300, 0.0))
    assert max(work[450:]) == max(work[40:60]) < 10
