"""Calls of the public interface as type checkers should see them. `make lint` checks the file with mypy.

A line that must be refused ends with `# type: ignore`: mypy objects to one that it has no use for.
"""

from collections.abc import Iterator
from typing import assert_type

import numpy as np
import torch

import specbeam
from specbeam import LanguageModel, Options, Piece, Result, Sequence, SpecbeamError, TokenTrie

lm: LanguageModel = specbeam.load("smollm2-135m-instruct")
messages = [{"role": "user", "content": "Hi"}]

# One prompt gives one result.
assert_type(specbeam.generate(lm, "Hi"), Result)
assert_type(specbeam.generate(lm, messages), Result)
assert_type(specbeam.generate(lm, [1, 2, 3]), Result)
assert_type(specbeam.generate(lm, (1, 2, 3)), Result)
assert_type(specbeam.generate(lm, np.array([1, 2, 3])), Result)
assert_type(specbeam.generate(lm, torch.tensor([1, 2, 3])), Result)
assert_type(specbeam.generate(lm, "Hi").text, str)

# Several prompts give a list.
assert_type(specbeam.generate(lm, ["Hi", "Ho"]), list[Result])
assert_type(specbeam.generate(lm, ("Hi", "Ho")), list[Result])
assert_type(specbeam.generate(lm, [messages, messages]), list[Result])
assert_type(specbeam.generate(lm, [[1, 2], [3]]), list[Result])
assert_type(specbeam.generate(lm, ["Hi", [1, 2], messages]), list[Result])
assert_type(specbeam.generate(lm, [torch.tensor([1]), torch.tensor([2])]), list[Result])

# Options have names and types.
specbeam.generate(lm, "Hi", system="Be brief.", raw=True, draft="ngram", max_new_tokens=8, temperature=1, top_p=0.9)
specbeam.generate(lm, "Hi", eos_token_id=[1, 2], stop_strings="\n", num_draft_tokens="auto", early_stopping="never")
specbeam.generate(lm, "Hi", constraint=TokenTrie([[1, 2]]), stop_strings=["\n", "."], eos_token_id=2)
specbeam.generate(lm, "Hi", constraint=TokenTrie(["Paris", "Rome"], lm), num_beams=2, distinct=True)
specbeam.generate(lm, "Hi", {"max_new_tokens": 8}, bad_words_ids=[[1, 2]], logit_bias={3: -100}, frequency_penalty=1)
specbeam.generate(lm, "Hi", Options(max_new_tokens=8), logit_bias=[3])  # type: ignore
specbeam.generate(lm, "Hi", prefix_allowed_tokens_fn=lambda batch, ids: [1, 2])
specbeam.generate(lm, "Hi", logits_processor=lambda ids, scores: scores)
specbeam.generate(lm, "Hi", draft=specbeam.load("smollm2-135m-instruct"), num_draft_tokens=4)
specbeam.generate(lm, "Hi", draft=specbeam.suffix_automaton(lm, ["Hi"]))
specbeam.generate(lm, "Hi", draft=lambda tokens, model: tokens[-3:], num_draft_tokens=4)
specbeam.generate(lm, "Hi", draft=lambda tokens, model: [tokens[-3:], [model.backend.vocab_size - 1]])
specbeam.generate(lm, "Hi", draft="my_module:propose", strategy="my_module:strategy")
specbeam.generate(lm, "Hi", strategy=7)  # type: ignore
specbeam.generate(lm, "Hi", max_tokens=8)  # type: ignore
specbeam.generate(lm, "Hi", max_new_tokens="8")  # type: ignore
specbeam.generate(lm, "Hi", num_beams=2.5)  # type: ignore
specbeam.generate(lm, "Hi", draft=5)  # type: ignore
specbeam.generate(lm, 3.5)  # type: ignore
specbeam.generate("Hi")  # type: ignore

# Streams and the n best texts take one prompt.
assert_type(specbeam.stream(lm, "Hi", max_new_tokens=8), Iterator[Piece])
assert_type(specbeam.nbest(lm, messages, num_beams=8, length_penalty=0.0), Iterator[Sequence])
assert_type([piece.text for piece in specbeam.stream(lm, [1, 2])], list[str])
specbeam.stream(lm, "Hi", max_tokens=8)  # type: ignore
specbeam.nbest(lm, "Hi", num_beams="4")  # type: ignore
specbeam.stream(lm, [messages])  # type: ignore

# The engine.
engine = specbeam.Engine(lm, max_requests=4)
request = engine.submit("Hi", Options(max_new_tokens=8))
assert_type(request.result(), Result)
assert_type(request.result().sequences[0].score, float)
assert_type([(key, done.result().text) for key, done in engine.as_completed([("a", request)])], list[tuple[str, str]])
engine.submit(3.5)  # type: ignore
Options(max_tokens=8)  # type: ignore

# Names that are misspelt, errors, and the modules of the package.
specbeam.genrate(lm, "Hi")  # type: ignore
print(specbeam.PromptTolong)  # type: ignore
handle: specbeam.Request = request
for kind in (specbeam.NotFinite, specbeam.PromptTooLong, specbeam.QueueFull):
    assert issubclass(kind, SpecbeamError)
try:
    engine.submit("Hi")
except specbeam.PromptTooLong as refused:
    assert_type(refused.tokens, str)
assert_type(specbeam.hf.wrap(object()), LanguageModel)
specbeam.hf.unwrap(object())  # type: ignore
