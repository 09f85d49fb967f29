"""The language check: phrases that it finds, and text that it leaves alone."""

from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

language = SourceFileLoader("language", str(Path(__file__).parent.parent / ".ci/language")).load_module()


def found(name, text):
    return sorted((line, phrase) for line, phrase, _ in language.findings(Path(name), text))


@pytest.mark.parametrize(
    ("sentence", "phrase"),
    [
        ("Make room for at least so many slots.", "so many"),
        ("Its texts are those of greedy search.", "those of"),
        ("A draft costs 3 ms a pass.", "ms a pass"),
        ("It proposes tokens a beam.", "tokens a beam"),
        ("There is one thread a core.", "thread a core"),
        ("It starts from what was proposed.", "from what"),
        ("The user is told.", "told"),
        ("A tie may fall another way.", "fall another way"),
        ("The model that checks is large.", "model that checks"),
        ("Few guesses are accepted.", "guesses"),
        ("It answers a wish.", "wish"),
        ("All beams share a trunk.", "trunk"),
        ("It reads no sound.", "sound"),
        ("Drafts of the user's own follow.", "of the user's own"),
        ("The step is not certain yet.", "is not certain"),
        ("Give a whole number.", "whole number"),
    ],
)
def test_a_phrase_that_stumbles_is_found(sentence, phrase):
    assert found("a.md", f"Plain.\n\n{sentence}\n") == [(3, phrase)]
    assert found("a.md", sentence.replace(" ", "\n"))[0][1] == phrase


def test_plain_sentences_of_any_length_code_and_addresses_pass():
    plain = "It proposes 8 tokens per beam, `so many` is code, the result is None, and it takes a pass"
    assert found("a.md", ", ".join([plain] * 5) + ".") == []
    assert found("a.md", "```\nso many\n```\n\nSee [this](https://a.b/so many) and ``so `many` ``.\n") == []


def test_past_decisions_keep_their_terms():
    assert found("docs/decisions/README.md", "Guesses pay, it is told.\n") == [(1, "told")]
    assert found("a.md", "By chance, it is certain to end.\n") == []


def test_docstrings_comments_and_messages_of_python_are_read():
    source = '''"""It has so many."""
x = "so many"  # it is told in é so
# many
def f(a):
    """Do it.

    Args:
        a: so many.
    """
    raise ValueError("é", f"{a} is told")
'''
    assert found("a.py", source) == [(1, "so many"), (2, "so many"), (2, "told"), (8, "so many"), (10, "told")]
    assert found("tool", f"#!/usr/bin/env python3\n{source}")[0] == (2, "so many")


def test_comments_of_other_languages_and_notebooks_are_read():
    code = 'f("// so many");  // so\n// many, so many\n\n/* told */'
    assert found("a.cpp", code) == [(1, "so many"), (2, "so many"), (4, "told")]
    assert found("Makefile", 'a: "# told"  # told\n# so many\n') == [(1, "told"), (2, "so many")]
    cell = ' "cell_type": "markdown",\n "source": [\n  "Plain.\\n",\n  "It is told.\\n"\n ]'
    assert found("a.ipynb", f'{{"cells": [{{\n{cell}}}]}}') == [(5, "told")]
