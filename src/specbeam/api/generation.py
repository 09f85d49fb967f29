"""Generate text in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack, overload

from specbeam.decoding.setup import MakeStrategy
from specbeam.engine import Engine, Request
from specbeam.engine.drafts import Draft
from specbeam.errors import SpecbeamError, located
from specbeam.models.model import LanguageModel
from specbeam.models.prompts import Prompt, as_list, encode, is_batch, max_prompt_length
from specbeam.options.keywords import OptionKeywords, show_option_keywords
from specbeam.options.options import Options, given_options
from specbeam.results import Piece, Result
from specbeam.results import Sequence as FoundSequence


# A string is a sequence of strings, too. Type checkers take the first overload that fits, as is_batch does.
@overload
def generate(  # type: ignore[overload-overlap]
    lm: LanguageModel,
    prompt: Prompt,
    options: Options | Mapping[str, Any] | None = None,
    *,
    system: str | None = None,
    raw: bool = False,
    draft: Draft | None = None,
    strategy: MakeStrategy | str | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Result: ...
@overload
def generate(
    lm: LanguageModel,
    prompt: Sequence[Prompt] | Iterator[Prompt],
    options: Options | Mapping[str, Any] | None = None,
    *,
    system: str | None = None,
    raw: bool = False,
    draft: Draft | None = None,
    strategy: MakeStrategy | str | None = None,
    **keywords: Unpack[OptionKeywords],
) -> list[Result]: ...
@show_option_keywords
def generate(
    lm: LanguageModel,
    prompt: Any,
    options: Options | Mapping[str, Any] | None = None,
    *,
    system: str | None = None,
    raw: bool = False,
    draft: Draft | None = None,
    strategy: MakeStrategy | str | None = None,
    **keywords: Any,
) -> Result | list[Result]:
    """Generate from one prompt, or from several at once.

    Args:
        lm: a model that :func:`specbeam.load` returned.
        prompt: text, a list of chat messages (dictionaries with "role" and "content"), a list of token ids, or a list
            of any of these. A list may also be a generator, a NumPy array, or a column of pandas, polars, pyarrow or
            datasets.
        system: a system message to put before text or messages.
        raw: do not apply the model's chat template.
        draft: proposes draft tokens, to speed up generation: a loaded model or its source, "mtp" (the model's own draft
            head), "ngram", "suffix", or an automaton that :func:`specbeam.suffix_automaton` returned. A source is
            loaded once. A drafter of your own is a function of the token ids so far and the model that returns the
            token ids that may follow, or its name as "module:name" (docs/guides/extend.md).
        strategy: a decoding method of your own in place of the one that the options name, or its name as "module:name"
            (docs/guides/extend.md).
        options: :class:`specbeam.Options`, or a mapping of its fields.
        keywords: fields of :class:`specbeam.Options`, such as ``max_new_tokens=64``. They override ``options``.

    Returns:
        A :class:`specbeam.Result`; for a list of prompts, a list of them in the same order.

    Raises:
        SpecbeamError: a prompt, an option, a draft or a strategy is not allowed, or one of your own fails. All prompts
            of a list are checked before the first forward pass. The message has the prompt's number, from 0. The check
            tokenizes each text, and keeps no tokens.
    """
    engine = Engine(lm)
    chosen = Options.of(options, **keywords)
    how: dict[str, Any] = {"system": system, "raw": raw, "draft": draft, "strategy": strategy}
    prompt = as_list(prompt)
    if not is_batch(prompt):
        request = engine.submit(prompt, chosen, **how)
        engine.run()
        return request.result()
    prompts = [*map(as_list, prompt)]
    longest, length = 0, 0
    for number, one in enumerate(prompts):
        with located(f"prompt {number}"):
            tokens = len(encode(lm, one, system=system, raw=raw, max_tokens=max_prompt_length(lm)))
        longest, length = (number, tokens) if tokens > length else (longest, length)
    with located(f"prompt {longest}"):  # the others need less room
        engine.check(prompts[longest], chosen, **how)
    submissions = _submissions(engine, prompts, chosen, **how)
    results = {number: request.result() for number, request in engine.as_completed(submissions)}
    return [results[number] for number in range(len(prompts))]


def _submissions(
    engine: Engine, prompts: Iterable[Prompt], chosen: Options, **how: Any
) -> Iterator[tuple[int, Request]]:
    """Submit each prompt when it is asked for."""
    for number, prompt in enumerate(prompts):
        with located(f"prompt {number}"):
            request = engine.submit(prompt, chosen, **how)
        yield number, request


@show_option_keywords
def stream(
    lm: LanguageModel,
    prompt: Prompt,
    options: Options | Mapping[str, Any] | None = None,
    *,
    system: str | None = None,
    raw: bool = False,
    draft: Draft | None = None,
    strategy: MakeStrategy | str | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Iterator[Piece]:
    """Generate from one prompt, and yield pieces as soon as they are final: text, tokens and log-probabilities.

    A piece never ends inside a character and never shows part of a stop string. All pieces together are
    ``generate(...).text`` and its ``token_ids``. The last piece has the result, with its statistics.

    Arguments and errors as for :func:`generate`, except that a list of prompts is refused.
    """
    prompt = as_list(prompt)
    if is_batch(prompt):
        raise SpecbeamError("stream takes one prompt: use Engine to stream several at once")
    engine = Engine(lm)
    request = engine.submit(
        prompt, Options.of(options, **keywords), system=system, raw=raw, draft=draft, strategy=strategy
    )
    return _pieces(engine, request)


@show_option_keywords
def nbest(
    lm: LanguageModel,
    prompt: Prompt,
    options: Options | Mapping[str, Any] | None = None,
    *,
    system: str | None = None,
    raw: bool = False,
    draft: Draft | None = None,
    strategy: MakeStrategy | str | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Iterator[FoundSequence]:
    """The finished hypotheses of beam search, best first, each as soon as no other can come before it.

    They are ``generate(..., num_return_sequences=num_beams).sequences``, with 4 beams if ``num_beams`` is not given.
    To stop taking them stops the search. With ``length_penalty=0`` scores only fall as hypotheses grow, so they are
    final soonest. With a higher penalty, a hypothesis is final once even the longest continuation of the best beam
    could not beat it. A strategy of your own yields hypotheses once they are final.

    Arguments and errors as for :func:`generate`, except that a list of prompts is refused.
    """
    prompt = as_list(prompt)
    if is_batch(prompt):
        raise SpecbeamError("nbest takes one prompt: call it once for each")
    given = {"num_beams": 4, **given_options(options), **keywords}
    given.setdefault("num_return_sequences", given["num_beams"])
    engine = Engine(lm)
    request = engine.submit(prompt, Options.of(given), system=system, raw=raw, draft=draft, strategy=strategy)
    return _sequences(engine, request)


def _sequences(engine: Engine, request: Request) -> Iterator[FoundSequence]:
    more, yielded = True, 0
    while more:
        more = engine.step()
        while request.found:
            yielded += 1
            yield request.found.popleft()
    yield from request.result().sequences[yielded:]


def _pieces(engine: Engine, request: Request) -> Iterator[Piece]:
    pieces, more = request.pieces, True
    while more:
        more = engine.step()
        while pieces:
            yield pieces.popleft()
    request.result()  # raises the error that ended the request, if any
