"""An encoder's work beside other requests: of audio, and of text in the cpu backend, whose bits depend on no batch.

No family has such an encoder of text yet. It stands in for one: Whisper's decoder attends to rows of a table, one for
each token of the prompt, to which each layer adds the mean of all rows.
"""

import math

import numpy as np
import pytest

import specbeam
from specbeam import Engine
from specbeam.engine.shared_source import SharedSource, encode, together
from tests.speech.conftest import BANDS, POSITIONS, START, random_whisper, whisper_tokenizer

LAYERS, HIDDEN, BATCH = 3, 32, 64
TEXTS = [[2 + (n * k) % 250 for k in range(1, n)] for n in (20, 9, 3, 12, 60, 10, 90, 11)]
AUDIO = [np.random.default_rng(i).normal(size=(BANDS, 2 * POSITIONS)).astype(np.float32) for i in range(4)]


def read_tokens(backend, seed=0):
    """Let a backend have an encoder of text, and return a list that gets the lengths and layers of its calls."""
    table, calls = np.random.default_rng(seed).normal(size=(256, HIDDEN)).astype(np.float32), []

    def run(sources, layers, begun):
        calls.append(([*map(len, sources)], layers))
        states = [table[source] for source in sources] if begun is None else begun
        for _ in layers:
            states = [one + one.mean(axis=0) for one in states]
        return states

    backend.encoder_reads, backend.features_shape, backend.start_token_ids = "tokens", None, [START]
    backend.encoder_batch, backend.positions, backend.encode = BATCH, len, run
    backend.encoder_digest = f"of table {seed}"
    return calls


def read_audio(backend):
    """A list that gets the lengths and layers of the calls of an encoder of audio."""
    calls, run = [], backend.encode
    backend.encode = lambda some, *of: calls.append(([*map(backend.positions, some)], of[0])) or run(some, *of)
    return calls


@pytest.fixture
def load(save):
    def load(seed=0):
        folder = save(random_whisper(seed, encoder_layers=LAYERS, max_target_positions=128), whisper_tokenizer())
        return specbeam.load(folder, quantize="float32", threads=1)

    return load


@pytest.fixture(params=["tokens", "audio"])
def model(request, load):
    """A model, what it is asked for, and the calls of its encoder."""
    lm = load()
    if request.param == "tokens":
        return lm, [{"prompt": text} for text in TEXTS], read_tokens(lm.backend)
    return lm, [{"prompt": [START, 65], "features": audio} for audio in AUDIO], read_audio(lm.backend)


def run(lm, asked, options, draft=None, **limits):
    engine = Engine(lm, **limits)
    requests = [engine.submit(**one, options=options, draft=draft) for one in asked]
    engine.run()
    assert (engine.cache_tokens, engine.kept_tokens) == (0, 0)
    return [[(s.token_ids, s.score) for s in request.result().sequences] for request in requests]


@pytest.mark.parametrize("beams", [1, 3])
def test_batches_divisions_preemption_and_drafts_change_no_bit(model, beams):
    lm, asked, calls = model
    options = {"max_new_tokens": 12, "num_beams": beams, "num_return_sequences": beams}
    alone = [run(lm, [one], options)[0] for one in asked]
    calls.clear()
    limits = {"max_cache_tokens": 240, "max_requests": 4}
    for limit in ({}, {"max_pass_seconds": 0}, {"max_batch_tokens": 4}, limits):
        assert run(lm, asked, options, **limit) == alone
        assert sum(len(lengths) * len(layers) for lengths, layers in calls) == LAYERS * len(asked)
        calls.clear()
    for draft in ("ngram", lm):
        assert run(lm, asked, options, draft) == alone
        assert sum(len(lengths) for lengths, _ in calls) == len(asked)  # a draft with the same encoder reads nothing
        calls.clear()


def test_sources_that_arrive_together_are_read_together_if_they_are_short(model):
    lm, asked, calls = model
    run(lm, asked, {"max_new_tokens": 2})
    whole = range(LAYERS)
    if lm.backend.encoder_reads == "tokens":
        assert calls == [([89], whole), ([59], whole), ([19, 11, 10], whole), ([9, 8], whole), ([2], whole)]
    else:
        assert calls == [([POSITIONS], whole)] * len(asked)


def test_one_group_is_read_between_two_passes_of_others(model):
    """The oldest request's, layer by layer where the time is short."""
    lm, asked, calls = model
    groups = [[19, 11, 10], [9, 8], [2], [59], [89]]
    if lm.backend.encoder_reads == "audio":
        groups = [[POSITIONS]] * 4
    for seconds, parts in ((None, [range(LAYERS)]), (0, [range(i, i + 1) for i in range(LAYERS)])):
        engine = Engine(lm, max_requests=16, max_pass_seconds=seconds)
        first = engine.submit(**asked[-1], options={"max_new_tokens": 40, "eos_token_id": []})
        engine.step()
        calls.clear()
        later = [engine.submit(**one, options={"max_new_tokens": 4}) for one in asked]
        expected = [(group, part) for group in groups for part in parts]
        for number in range(len(expected)):
            engine.step()
            assert calls == expected[: number + 1]
        assert not first.done
        engine.run()
        assert calls == expected
        assert all(request.result().token_ids for request in later)


def test_a_draft_shares_an_encoder_that_is_equal(load):
    lm, draft = load(), load(1)
    calls, options = read_tokens(lm.backend), {"max_new_tokens": 12, "num_draft_tokens": 2, "draft_width": 1}
    for seed, passes in ((0, 0), (1, 1)):
        of_draft = read_tokens(draft.backend, seed)
        calls.clear()
        run(lm, [{"prompt": TEXTS[0]}], options, draft)
        # The draft comes first, so it may read for both.
        assert len(calls) + len(of_draft) == 1 + passes
        shared = SharedSource(np.array(TEXTS[0]))
        assert shared.unread_positions(draft.backend, lm.backend) == passes * len(TEXTS[0])
        assert shared.unread_positions(draft.backend, None) == len(TEXTS[0])
        encode(draft.backend, [shared], math.inf)
        assert shared.unread_positions(draft.backend, None) == 0
        assert shared.is_read(lm.backend) == (not passes)


def test_groups_are_of_like_length_and_after_the_same_layers(load):
    backend = load().backend
    read_tokens(backend)
    sources = [SharedSource(np.full(length, 5)) for length in (10, 21, 65, 20, 19, 21, 66)]
    encode(backend, [sources[3]], 0)
    lengths = [[len(one.source) for one in group] for group in together(backend, [*sources, sources[0]])]
    assert lengths == [[20], [66], [65], [21, 21, 19], [10]]
