"""The rules for timestamps, against transformers' processor, and the segments, against transformers' long form."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbeam import Engine
from specbeam.core.selection import SelectionRequest
from specbeam.core.tree import Tree
from specbeam.speech.timestamps import TranscriptRules, split
from specbeam.speech.vocabulary import Vocabulary
from specbeam.structured.constraint_mask import ConstraintMask
from tests.conftest import needs_torch, torch, transformers
from tests.speech.conftest import BANDS, END, NO_TIMES, POSITIONS, START, TIMES, TRANSCRIBE

SIZE = TIMES + POSITIONS + 1


def processor(latest_first):
    config = SimpleNamespace(
        **{"no_timestamps_token_id": NO_TIMES, "eos_token_id": END, "max_initial_timestamp_index": latest_first}
    )
    return transformers.WhisperTimeStampLogitsProcessor(config, begin_index=1)


def texts():
    """New tokens as the rules allow them, more or less: text, and timestamps that do not decrease."""

    def ordered(tokens):
        latest = 0
        for token in tokens:
            if token >= TIMES:
                latest = max(latest, token)
            yield max(token, latest) if token >= TIMES else token

    some = st.lists(st.integers(0, 255) | st.integers(TIMES, SIZE - 1), max_size=12)
    return some.map(lambda tokens: [*ordered(tokens)])


def allowed_path(rules, tokens):
    """The first of the tokens that the rules allow one after another."""
    state, path = rules.start, []
    for token in tokens:
        if (after := rules.advance(state, token)) is None:
            break
        state = after
        path.append(token)
    return path


@needs_torch
@given(st.integers(0, 2**31), texts(), st.integers(0, POSITIONS), st.floats(0, 8))
def test_scores_are_changed_as_transformers_changes_them(whisper, seed, tokens, latest_first, weight):
    rules = TranscriptRules(Vocabulary.of(whisper), [], [], latest_first)
    path = [START, *allowed_path(rules, tokens)]
    logits = torch.tensor(np.random.default_rng(seed).normal(size=(1, SIZE)).astype(np.float32)) * 2
    logits[:, TIMES:] += weight - 4
    expected = processor(latest_first)(torch.tensor([path]), logits)
    tree = Tree([START])
    node = tree.tip
    for token in path[1:]:
        (node,) = tree.add([node], [token])
    allowed = ConstraintMask(rules, [END], SIZE)(tree, np.array([node]))
    request = SelectionRequest(top=SIZE, allowed=allowed, together=rules.together)
    from specbeam.backends.torch.sampling import select

    of_torch, (native,) = select(logits, request), whisper.backend.choose(logits.numpy(), [(slice(0, 1), request)])
    for selection in (of_torch, native):
        found = np.empty(SIZE, np.float32)
        found[selection.tokens[0]] = selection.scores[0]
        np.testing.assert_array_equal(found, expected[0].numpy())


def test_suppressed_tokens_never_follow(whisper):
    rules = TranscriptRules(Vocabulary.of(whisper), [65, TIMES + 3], [66], 10)
    plain = TranscriptRules(Vocabulary.of(whisper), [65, TIMES + 3], [66], None)

    def allowed(rules, *tokens):
        state = rules.start
        for token in tokens:
            state = rules.advance(state, token)
            assert state is not None
        return {*np.flatnonzero(np.unpackbits(rules.mask(state, SIZE), bitorder="little"))}

    assert allowed(rules) == {*range(TIMES, TIMES + 11)} - {TIMES + 3}
    assert allowed(rules, TIMES) == {*range(NO_TIMES)} - {65}
    assert allowed(rules, TIMES, 66) == {*range(NO_TIMES), *range(TIMES + 1, SIZE)} - {65, TIMES + 3}
    assert allowed(rules, TIMES, 66, TIMES + 4) == {*range(END, NO_TIMES), *range(TIMES + 4, SIZE)}
    assert allowed(rules, TIMES, 66, TIMES + 4, TIMES + 4) == {*range(NO_TIMES)} - {65}
    assert allowed(plain) == {*range(NO_TIMES)} - {65, 66}
    assert allowed(plain, 70) == {*range(NO_TIMES)} - {65}
    assert rules.advance(rules.start, 66) is None
    assert (rules.together, plain.together) == ((TIMES, SIZE), None)


@needs_torch
@given(texts(), st.integers(2, 2 * POSITIONS))
def test_segments_are_those_of_the_long_form(tokens, frames):
    if not tokens:
        assert split([], range(TIMES, SIZE), frames) == ([(0, frames, [])], frames)
        return
    expected, offset = transformers.WhisperForConditionalGeneration._retrieve_segment(
        seek_sequence=torch.tensor(tokens),
        seek_outputs=[{}],
        time_offset=torch.zeros(1, dtype=torch.float64),
        timestamp_begin=TIMES,
        seek_num_frames=torch.tensor([frames]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 0),
    )
    segments, step = split(tokens, range(TIMES, SIZE), frames)
    assert step == int(offset)
    for found, one in zip(segments, expected, strict=True):
        if one["tokens"][0] >= TIMES or found.start == 0:
            assert found.start / 100 == pytest.approx(float(one["start"]), abs=1e-9)
        assert found.end / 100 == pytest.approx(float(one["end"]), abs=0.0201)  # rounded down there
        assert one["tokens"].tolist()[: len(found.tokens)] == found.tokens


@pytest.mark.parametrize("beams", [1, 3])
def test_sequences_obey_the_rules_and_say_how_probable_the_allowed_tokens_were(whisper, beams):
    """Against a loop over the model's own logits."""
    rules = TranscriptRules(Vocabulary.of(whisper), [65], [66], 10)
    features = np.random.default_rng(3).normal(size=(BANDS, 2 * POSITIONS)).astype(np.float32)
    engine = Engine(whisper)
    options = {"num_beams": beams, "distinct": False} if beams > 1 else {}
    request = engine.submit(
        [START, TRANSCRIBE], {"max_new_tokens": 12, "constraint": rules, **options}, features=features
    )
    engine.run()
    (best,) = request.result().sequences
    prompt, state, masses = [START, TRANSCRIBE], rules.start, []
    for token, log_prob in zip(best.token_ids, best.log_probs, strict=True):
        plain = engine.submit(prompt, {"max_new_tokens": 1, "top_logprobs": SIZE}, features=features)
        engine.run()
        row = plain.result().sequences[0].top_logprobs[0]
        assert row[token] == pytest.approx(log_prob, abs=1e-4)
        bits = np.unpackbits(rules.mask(state, SIZE), bitorder="little")
        allowed = {i: row[i] for i in range(SIZE) if bits[i]}
        times = [value for i, value in allowed.items() if i >= TIMES]
        if times and np.logaddexp.reduce(times) > max([v for i, v in allowed.items() if i < TIMES], default=-np.inf):
            allowed = {i: value for i, value in allowed.items() if i >= TIMES}
        masses.append(np.logaddexp.reduce([*allowed.values()]))
        assert token in allowed
        state = rules.advance(state, token)
        prompt.append(token)
    assert best.allowed_log_probs == pytest.approx(masses, abs=1e-4)
