"""Cached prefixes, against a dictionary of all their beginnings."""

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specbeam.cache.prefixes import PrefixCache

# Long beginnings, because sequences lose at least 64 tokens at a time.
SEQUENCE = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(lambda sequence: sequence[:1] * 60 + sequence)


def slots_of(known, sequence):
    """The slots of the longest beginning of a sequence that a dictionary knows."""
    found = []
    while len(found) < len(sequence) and (slot := known.get(tuple(sequence[: len(found) + 1]))) is not None:
        found.append(slot)
    return found


@given(st.data())
def test_sequences_are_found_as_far_as_they_were_cached(data):
    """Trees hold whole paths, as requests do. With windows they let go of the beginnings."""
    draw, prefixes, known, held = data.draw, PrefixCache(), {}, []
    references, free = np.zeros(10_000, dtype=np.int32), iter(range(10_000))
    for _ in range(draw(st.integers(1, 40))):
        match draw(st.sampled_from(["add", "add", "find", "let go", "evict"])):
            case "add":
                sequence = draw(SEQUENCE)
                slots = [*slots_of(known, sequence)]
                slots += [next(free) for _ in sequence[len(slots) :]]
                ends = draw(st.integers(1, len(sequence)))  # where it has no slots any more
                placed = [slot if at < ends else -1 for at, slot in enumerate(slots)]
                added = prefixes.add(np.array(sequence), np.array(placed)).tolist()
                expected = {tuple(sequence[: n + 1]): slot for n, slot in enumerate(placed) if slot >= 0}
                assert added == [slot for start, slot in expected.items() if start not in known]
                known |= expected
                held.append(np.array(slots[:ends]))
                references[held[-1]] += 1
            case "find":
                sequence = draw(SEQUENCE)
                find = draw(st.sampled_from([prefixes.find, prefixes.use]))
                assert find(np.array(sequence)).tolist() == slots_of(known, sequence)
            case "let go" if held:
                references[held.pop(draw(st.integers(0, len(held) - 1)))] -= 1
            case "evict":
                least = draw(st.integers(1, 200))
                unheld = sum(not references[slot] for slot in known.values())
                gone = {slot for part in prefixes.evict(min(least, unheld), references) for slot in part.tolist()}
                assert sum(not references[slot] for slot in gone) >= min(least, unheld)
                known = {start: slot for start, slot in known.items() if slot not in gone}
                # Sequences lose their ends, and nothing is evicted in vain.
                assert all(start[:-1] in known for start in known if len(start) > 1)
                assert not gone or unheld
        assert sorted(prefixes.slots().tolist()) == sorted(known.values())


def test_what_is_held_costs_nothing_to_keep():
    """Sequences in use are looked at once, and none is looked at again because it was found often."""
    prefixes, references = PrefixCache(), np.zeros(300_000, dtype=np.int32)

    def add(number, is_held=False):
        slots = np.arange(100) + 100 * number
        prefixes.add(np.array([number, *range(99)]), slots)
        references[slots] = is_held

    for number in range(1000):
        add(number, is_held=number < 500)
    for _ in range(3):
        for number in range(1000):
            prefixes.use(np.array([number, 0, 1]))

    looked_at = mock.MagicMock()
    looked_at.__getitem__.side_effect = references.__getitem__
    for _ in range(500):
        assert [*prefixes.evict(1, looked_at)]
    # At each sequence in use once, and at each sequence that loses its end.
    assert 500 <= looked_at.__getitem__.call_count <= 500 + 500


def test_a_sequence_that_grows_by_pieces_is_one_piece():
    prefixes, sequence = PrefixCache(), np.arange(3000)

    def leave(end):
        prefixes.use(sequence[:end])
        prefixes.add(sequence[:end], sequence[:end])

    leave(10)
    for end in range(13, 3001, 3):
        leave(end)
    leave(3000)
    assert prefixes.find(sequence).tolist() == sequence.tolist()
    (whole,) = prefixes.evict(3000, np.zeros(3000, dtype=np.int32))
    assert whole.tolist() == sequence.tolist()
