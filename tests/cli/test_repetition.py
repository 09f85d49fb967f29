"""A loop at the end of a text is found, and a text that is only long has none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbeam.cli.repetition import MIN_CHARACTERS, MIN_TIMES, repeated_end


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("Dear Sir,\n" + 20 * "[Your Business Address]\n" + "[Your Bus", "[Your Business Address]"),
        ("A list:" + "".join(f"\n{number}. Do it again." for number in range(90, 110)), "0. Do it again."),
        ("It is " + 30 * "very, " + "very", "very,"),
        ("Well, " + 100 * "ha", "ha"),
        ("啊" * 100, "啊"),
        ("no, no, no, no, no.", ""),
        ("one two three four five six seven eight nine ten. " * 3, ""),
        (
            20 * "[Your Business Address]\n"
            + "Yours sincerely, and with many thanks for all that you have done for us",
            "",
        ),
        ("", ""),
    ],
)
def test_texts(text, part):
    assert repeated_end(text) == part


@given(
    st.text("abc \n", max_size=40), st.text("ab \n", min_size=1, max_size=12), st.integers(1, 60), st.integers(0, 11)
)
def test_the_part_repeats_as_often_as_a_loop_needs(before, part, times, cut):
    text = before + part * times + part[:cut]
    found = repeated_end(text)
    if len(part) * times >= max(MIN_CHARACTERS, MIN_TIMES * len(part)):
        assert found or not part.strip()
    if found:
        assert text.count(found) >= MIN_TIMES
