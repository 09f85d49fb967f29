"""The outputs of a TokenTrie, as JSON."""

import json

import specbeam
from tests.fuzz.json_mutator import mutate_json as mutate
from tests.fuzz.toys import toy

__all__ = ["mutate", "run", "seeds"]


def seeds() -> list[bytes]:
    return [json.dumps(outputs).encode() for outputs in ([[1, 2], [1, 3, 4], [7]], [[257, 1], [2]], [[5]])]


def run(data: bytes) -> None:
    try:
        outputs = json.loads(data)
    except (ValueError, RecursionError):
        return
    trie = specbeam.TokenTrie(outputs)
    specbeam.generate(toy(), [1, 2], max_new_tokens=3, num_beams=2, constraint=trie)
