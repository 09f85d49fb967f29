"""Log-probabilities of given texts, against transformers evaluating each text alone."""

import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specbeam
from specbeam import SpecbeamError, hf
from specbeam.api.scoring import score
from specbeam.cache.pool import Pool, pool_of
from tests.conftest import random_model

VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)
CONTINUATIONS = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=6), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def model():
    return random_model("llama", vocab_size=VOCAB, eos_token_id=1, bos_token_id=2)


@pytest.fixture
def watched(model, monkeypatch):
    """The model, and of each pass: the nodes and the slots of its segments, and the number of its logits' rows."""
    lm, passes = hf.wrap(model), []
    forward = lm.backend.forward

    def noted(segments):
        logits = forward(segments)
        slots = [len({*one.prefix, *one.suffixes.ravel()}) for one in segments]
        passes.append(([len(one.tokens) for one in segments], slots, len(logits)))
        return logits

    monkeypatch.setattr(lm.backend, "forward", noted)
    return lm, passes


def expected(model, context, continuation):
    """The sum of log-probabilities, and whether the tokens are the likeliest, of one text alone."""
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    log_probs = logits.log_softmax(-1)[range(len(continuation)), continuation]
    return float(log_probs.sum()), logits.argmax(-1).tolist() == continuation


@given(
    groups=st.lists(st.tuples(TOKENS, CONTINUATIONS), min_size=1, max_size=4),
    max_contexts=st.integers(1, 3),
    max_batch_tokens=st.integers(1, 12),
    data=st.data(),
)
def test_scores_are_those_of_each_text_alone(model, groups, max_contexts, max_batch_tokens, data):
    texts = data.draw(st.permutations([(context, one) for context, many in groups for one in many]))
    limits = {"max_contexts": max_contexts, "max_batch_tokens": max_batch_tokens}
    answers = {number: answer for number, *answer in score(hf.wrap(model), texts, **limits)}
    assert sorted(answers) == list(range(len(texts)))
    for number, (log_prob, greedy) in answers.items():
        alone, likeliest = expected(model, *texts[number])
        assert log_prob == pytest.approx(alone, abs=1e-4)
        assert greedy is likeliest


def test_greedy_continuations_are_told(model):
    text = model.generate(torch.tensor([[3, 4]]), max_new_tokens=6, eos_token_id=-1, do_sample=False)[0].tolist()
    other = [*text[2:-1], (text[-1] + 1) % VOCAB]
    answers = {number: greedy for number, _, greedy in score(hf.wrap(model), [(text[:2], text[2:]), (text[:2], other)])}
    assert answers == {0: True, 1: False}


def test_a_shared_context_is_evaluated_once_and_long_texts_in_chunks(watched):
    lm, passes = watched

    def nodes_of_passes(texts, **limits):
        passes.clear()
        assert len(list(score(lm, texts, **limits))) == len(texts)
        return [nodes for nodes, *_ in passes]

    context = [3] * 20
    shared = nodes_of_passes([(context, [4, 5, 6]), (context, [7]), (context, [4, 5, 8])])
    assert shared == [[22]]  # the context, 4, and 5
    assert nodes_of_passes([([3], [5] * 50)], max_batch_tokens=16) == [[16], [16], [16], [2]]
    assert max(rows for *_, rows in passes) == 16
    assert nodes_of_passes([([n], [5] * 3) for n in range(6)], max_contexts=4) == [[3] * 4, [3] * 2]


def test_many_continuations_of_one_context_do_not_share_one_tree(watched):
    lm, passes = watched
    texts = [([3], [a, b, a, b]) for a in range(VOCAB) for b in range(VOCAB)]
    assert len(list(score(lm, texts, max_batch_tokens=32))) == len(texts)
    assert max(max(slots) for _, slots, _ in passes) <= 1 + 32


def test_a_context_may_be_as_long_as_the_models():
    model = random_model("llama", vocab_size=VOCAB, max_position_embeddings=16)
    texts = [([n % VOCAB for n in range(16)], [token]) for token in (3, 4)]
    answers = {number: log_prob for number, log_prob, _ in score(hf.wrap(model), texts)}
    for number, text in enumerate(texts):
        assert answers[number] == pytest.approx(expected(model, *text)[0], abs=1e-4)


EXAMPLES = [n % VOCAB for n in range(100)]


def test_contexts_that_begin_alike_share_a_prefix(model, watched):
    lm, passes = watched
    texts = [([*EXAMPLES, question, 3], [label, 4]) for label in (5, 6) for question in range(VOCAB)]
    answers = {number: log_prob for number, log_prob, _ in score(lm, texts)}
    # The first question with its two labels, then seven others beside each other.
    assert [nodes for nodes, *_ in passes] == [[104], [4] * 8, [4] * 3]
    for number, text in enumerate(texts):
        assert answers[number] == pytest.approx(expected(model, *text)[0], abs=1e-4)


@pytest.mark.parametrize("max_batch_tokens", [16, 512])
def test_a_shared_pass_or_prefix_changes_no_bit(lm, max_batch_tokens):
    lm = specbeam.load(lm.source, backend="cpu")
    texts = [([*EXAMPLES[: 100 - 30 * (n % 3)], n, n], [n % 5, n % 7, 8]) for n in range(20)]
    alone = [answer for text in texts for _, *answer in score(lm, [text])]
    assert [answer for _, *answer in sorted(score(lm, texts, max_batch_tokens=max_batch_tokens))] == alone


def test_contexts_that_are_done_are_evicted(model):
    lm = hf.wrap(model)
    pool = pool_of(lm.backend)
    texts = [([n % VOCAB, *EXAMPLES, n // VOCAB], [5]) for n in range(40)]
    in_use = [pool.in_use for _ in score(lm, texts, max_contexts=2)]
    assert max(in_use) <= 2 * 103  # two contexts with a continuation each
    del texts
    assert pool.in_use == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (([], [3]), "needs a context"),
        (([3], [VOCAB]), "token id 12 is not in"),
        (([3] * 250, [4] * 8), "has 258 tokens, but .* can score at most 257"),
        (([3] * 258, []), "has 25. tokens"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused(model, text, says):
    with pytest.raises(SpecbeamError, match=says):
        list(score(hf.wrap(model), [text]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_waits_for_a_thread_that_scores(lm, monkeypatch):
    """Otherwise the child's KV cache would stay locked."""
    inside, go_on, lend = threading.Event(), threading.Event(), Pool.lend

    def slow(*args):  # called while the cache is locked
        inside.set()
        go_on.wait()
        return lend(*args)

    monkeypatch.setattr(Pool, "lend", slow)
    thread = threading.Thread(target=lambda: list(score(lm, [([1, 2], [3, 4])])))
    thread.start()
    inside.wait()
    threading.Timer(0.2, go_on.set).start()
    if (child := os.fork()) == 0:
        os._exit(not pool_of(lm.backend).lock.acquire(timeout=5))
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
