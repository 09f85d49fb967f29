"""The language check: sentences that it finds, and sentences that it leaves alone."""

from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

language = SourceFileLoader("language", str(Path(__file__).parent.parent / ".ci/language")).load_module()
LONG = "One two three four five six seven eight nine ten, " * 3


def found(paragraphs):
    return [(finding.line, finding.advice.split('"')[1].strip()) for finding in language.check(paragraphs)]


@pytest.mark.parametrize(
    ("sentence", "phrase"),
    [
        ("Make room for at least so many slots.", "so many"),
        ("Its texts are those of greedy search.", "those of"),
        ("It returns None, or there is none.", "is none"),
        ("A draft costs 3 ms a pass.", "3 ms a pass"),
        ("It guesses tokens a beam.", "tokens a beam"),
        ("There is one thread a core.", "one thread a core"),
        ("It starts from what was guessed.", "from what"),
        ("The user is told.", "told"),
    ],
)
def test_a_phrase_that_stumbles_is_found(sentence, phrase):
    assert found(language.markdown(sentence)) == [(1, phrase)]


def test_plain_sentences_pass():
    text = "It guesses 8 tokens per beam. `so many` is code. The result is None. It takes a pass, e.g. the first one."
    assert found(language.markdown(text)) == []


def test_long_sentences_are_found_where_they_begin():
    (finding,) = language.check(language.markdown(f"Short.\n\nShort. {LONG}\nend.\n"))
    assert (finding.line, finding.advice) == (3, "31 words, at most 25: one claim each")


def test_code_tables_and_addresses_are_no_sentences():
    spans = " ".join(["`code`"] * 30)
    text = f"```\n{LONG}\n```\n\n    {LONG}\n\n| {LONG} |\n\nSee [this](https://a.b/{'x' * 99}) and {spans}.\n"
    assert found(language.markdown(text)) == []


def test_docstrings_comments_and_messages_of_python_are_read():
    source = '''"""It has so many."""
x = "so many"  # so many
def f(a):
    """Do it.

    Args:
        a: so many.
    """
    raise ValueError(f"{a} is told")
'''
    assert sorted(found(language.python(source))) == [(1, "so many"), (2, "so many"), (7, "so many"), (9, "told")]


def test_comments_of_other_languages_are_read():
    assert found(language.c_plus_plus('f("// so many");  // so\n// many, so many\n\n/* told */')) == [
        (2, "so many"),
        (4, "told"),
    ]
    assert found(language.hashes('a: "# told"  # told\n# so many\n')) == [(1, "told"), (2, "so many")]


def test_notebooks_are_read():
    cell = '{"cell_type": "markdown", "source": ["Plain.\\n",\n "It is told.\\n"]}'
    assert found(language.notebook(f'{{"cells": [\n{cell}]}}')) == [(3, "told")]
