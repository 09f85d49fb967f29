"""The prompts of the benches."""

from __future__ import annotations

import random
from typing import Any

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
    )
]


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
