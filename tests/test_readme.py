"""The README is short, and prints what it says on the model that it names."""

import contextlib
import io
import re

import pytest

from specbeam.engine.costs import nominal_cost
from tests.conftest import reference_model
from tests.pages import ROOT, blocks, text_of

README = ROOT / "README.md"


def test_it_has_at_most_120_lines():
    assert len(text_of(README).splitlines()) <= 120


@pytest.mark.models
def test_the_first_program_prints_what_stands_below_it(give_costs):
    give_costs(nominal_cost)  # how far to draft follows measured costs, which other programs on a machine change
    (program,) = [code for language, code in blocks(README) if language == "python"]
    (output,) = [code for language, code in blocks(README) if language == "text"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program.replace('"smollm2-135m-instruct"', repr(str(reference_model("smollm2-135m-instruct")))), {})
    *expected, passes = output.splitlines()
    *lines, counts = printed.getvalue().splitlines()
    assert lines == expected
    plain, drafted = map(int, re.findall(r"\d+", counts))
    assert re.sub(r"\d+", "N", counts) == re.sub(r"\d+", "N", passes)
    assert plain == int(re.findall(r"\d+", passes)[0])
    assert drafted < 0.8 * plain
