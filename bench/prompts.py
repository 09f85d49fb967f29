"""The prompts of the benches: a figure that stands for a kind of work comes from at least ten, drawn by a seed."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specbeam.models.prompts import render, token_ids
from specbeam.study.config import Data
from specbeam.study.data import read_rows

CODING = [
    "Write a Python function that merges two sorted lists into one sorted list.",
    "Write a Python class for a stack with push, pop and peek.",
    "Write a C function that counts the words of a string.",
    "Write a Python function that checks whether a string is a palindrome, ignoring case and punctuation.",
    "Write a JavaScript function that removes duplicates from an array of numbers.",
    "Write a Python decorator that caches the results of a function.",
    "Write a SQL query that lists the ten customers with the most orders.",
    "Write a Python script that reads a CSV file and prints the average of each column.",
    "Write a Java method that computes the nth Fibonacci number iteratively.",
    "Fix this function:\n\ndef mean(xs):\n    total = 0\n    for x in xs\n        total += x\n    return total/len(x)",
]

PROSE = [
    "Tell me a short story about a lighthouse keeper.",
    "Explain why the sky is blue to a child.",
    "Write a letter to a friend who is moving to another city.",
    "What are the main causes of the French Revolution?",
    "Describe a walk through an old town in autumn.",
    "What should I see in Lisbon in three days?",
    "Give me advice for a job interview.",
    "How does a vaccine work?",
    "Summarize the plot of Romeo and Juliet.",
    "What are the advantages and disadvantages of working from home?",
]


WORDS = """repair,build,paint,clean,choose,buy,sell,store,move,carry,cut,measure,draw,grow,cook,bake,taste,photograph
bicycle,wooden door,kitchen table,fence,window,chair,lamp,coat,boat,clock,mirror,tomato,rose,loaf of bread,cake,roof
at home,in the garden,in winter,for a party,with children,on a budget,without tools,in one hour,for beginners"""
VERBS, THINGS, PLACES = (line.split(",") for line in WORDS.splitlines())
TITLES = [f" How to {verb} a {thing} {place}" for verb in VERBS for thing in THINGS for place in PLACES]
"""Of the pages of a catalogue: texts that may follow a prompt of ``RETRIEVAL``."""

RETRIEVAL = [
    f"Question: My puppy does not listen to me.\nPage: How to train a dog\n\nQuestion: {question}\nPage:"
    for question in (
        "I want to make bread with yeast.",
        "My bike has a flat tyre, and I am new to this.",
        "What can I do against frost on the roses?",
        "The hands of the old clock in our kitchen do not move any more.",
        "My son turns three, and I want to surprise him with something sweet.",
        "We need something that keeps the neighbour's dog out of our beds.",
        "I have no room for my boat until spring.",
        "The rain comes in above the bedroom.",
        "Which lamp is right for a small room?",
        "I would like to sell my old coat.",
        "The seedlings on my balcony are too tall for their pots.",
        "We move next week, and the mirror is large.",
    )
]


@dataclass(frozen=True)
class Ask:
    """A prompt. ``raw``: a chat model reads it without its chat template, too."""

    text: str
    raw: bool = False

    def ids(self, tokenizer: Any) -> list[int]:
        """Its token ids."""
        if self.raw or not tokenizer.chat_template:
            found: list[int] = tokenizer(self.text).input_ids
            return found
        return token_ids(tokenizer, render(tokenizer, [{"role": "user", "content": self.text}]))


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """The options of :func:`kinds`."""
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="FILE", help="in the format of HumanEval or Spec-Bench"
    )
    parser.add_argument("--categories", nargs="+", help="A+B is one kind; HumanEval has asked and completed")
    parser.add_argument("--prompts", type=int, default=10, help="of each kind")
    parser.add_argument("--seed", type=int, default=0, help="draws the prompts")


def kinds(given: argparse.Namespace, own: Mapping[str, Sequence[str]] | None = None) -> dict[str, list[Ask]]:
    """The prompts of each kind, drawn with the seed from data sets, or else from the bench's own.

    Each category of a data set is a kind, or several together. HumanEval is two. "asked" is an instruction and the
    problem, as a message to a chat model. "completed" is the problem alone, without a chat template.

    Args:
        given: the options of :func:`add_prompt_options`.
        own: prompts by kind. Default: coding and prose.
    """
    found: dict[str, list[Ask]] = {}
    if not given.data:
        for kind, texts in (own or {"coding": CODING, "prose": PROSE}).items():
            found[kind] = [Ask(text) for text in draw(texts, given)]
    for file in given.data:
        name = Path(file).name.split(".")[0]
        rows = read_rows(Data(source=file), [], given.seed)
        if problems := [row for row in rows if row.problem is not None]:
            drawn = draw(problems, given)
            both = {
                "asked": [Ask(row.turns[0]) for row in drawn],
                "completed": [Ask(row.problem["prompt"], raw=True) for row in drawn if row.problem],
            }
            found |= {f"{name}, {kind}": both[kind] for kind in both if kind in (given.categories or both)}
            continue
        for kind in given.categories or dict.fromkeys(row.category or name for row in rows):
            if some := [row for row in rows if (row.category or name) in kind.split("+")]:
                found[kind] = [Ask(row.turns[0]) for row in draw(some, given)]
    return found


Item = TypeVar("Item")


def draw(items: Sequence[Item], given: argparse.Namespace) -> list[Item]:
    """As many as were asked for, in no order, so that the first ones are a draw, too."""
    return random.Random(given.seed).sample(items, min(given.prompts, len(items)))


class NewPrompts:
    """Makes prompts that begin differently."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(0)

    def __call__(self, tokens: int) -> list[int]:
        """A new prompt of this many token ids."""
        sentences = [*CODING, *PROSE]
        text = f"{self._random.randrange(10**9)}."
        ids: list[int] = []
        while len(ids) < tokens:
            self._random.shuffle(sentences)
            text = " ".join([text, *sentences])
            ids = self._tokenizer(text).input_ids
        return ids[:tokens]
