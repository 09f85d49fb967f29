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
