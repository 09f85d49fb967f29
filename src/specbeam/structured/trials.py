"""Trial compilations: what a grammar costs is found in a child process with limits, before this process compiles it.

A grammar of a few kilobytes can take all memory or time within one call of llguidance, or overflow its stack, and
nothing can interrupt such a call. So a grammar is compiled in a child first (:mod:`specbeam.system.child_processes`),
which is this module run as a program. All grammars pass it, whatever they are made of.
"""

from __future__ import annotations

import json
import sys
from functools import cache, lru_cache
from typing import Any, NamedTuple

from specbeam.system import child_processes

CPU_SECONDS, CPU_SECONDS_PER_BYTE = 0.8, 10e-6
"""Processor time for one grammar, and more for each byte of it. Schemas of applications take up to 40 ms."""
MEMORY_BYTES, MEMORY_PER_BYTE = 128 << 20, 256
"""Memory for one grammar beside what the child has at its start, and more for each byte of it."""
STACK_BYTES = 4 << 20
"""A thread of the process that compiles after the child has twice as much."""
MAX_REMEMBERED = 32


class Trial(NamedTuple):
    """What came of the compilation of a grammar.

    Attributes:
        problem: why it is refused: an error of llguidance, or a warning, since then it would not be enforced.
        stop: the error of its parser before the first token.
        forced: how many bytes all its texts begin with.
    """

    problem: str | None
    stop: str | None = None
    forced: int = 0


class TooCostly(Exception):
    """Says which limit a grammar exceeds."""


_worker = child_processes.Worker(__file__)
start = _worker.start


@lru_cache(MAX_REMEMBERED)
def trial(grammar: str, is_forcing: bool, lexer_fuel: int | None, max_symbols: int) -> Trial:
    """What comes of a grammar if it is compiled for a tokenizer whose tokens are bytes.

    Bytes as tokens show whether a text can begin.

    Args:
        is_forcing: its forced bytes are asked for.

    Raises:
        TooCostly: its compilation exceeds a limit.
        SpecbeamError: nobody waits for it any more.
    """
    try:
        return Trial(
            *json.loads(_worker.ask(json.dumps([grammar, is_forcing, lexer_fuel, max_symbols]).encode() + b"\n"))
        )
    except child_processes.Ended as error:
        if child_processes.ran_out_of_time(error.status):
            raise TooCostly("takes too much processor time to compile") from None
        raise TooCostly("takes too much memory to compile") from None


@cache
def byte_tokenizer() -> Any:
    """llguidance's tokenizer whose tokens are bytes."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def limits(lexer_fuel: int | None, max_symbols: int) -> Any:
    """llguidance's limits of a parser. Its errors are without the parser's state."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, step_lexer_fuel=lexer_fuel, max_grammar_size=max_symbols)


def _compiled(tokenizer: Any, grammar: str, is_forcing: bool, *limited: Any) -> Trial:
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits(*limited))
    if problems := [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings():
        return Trial(problems[0])
    matcher.compute_bitmask()
    forced = len(matcher.compute_ff_bytes()) if is_forcing else 0
    return Trial(None, matcher.get_error() if matcher.is_error() else None, forced)


def _serve() -> None:
    """The child: read grammars from standard input, one in a line, and answer each with a line on standard output."""
    tokenizer = byte_tokenizer()
    child_processes.limit_stack(STACK_BYTES)
    for line in sys.stdin.buffer:
        used = child_processes.memory_of_this_process()
        child_processes.limit_memory(used + MEMORY_BYTES + MEMORY_PER_BYTE * len(line))
        child_processes.end_after(CPU_SECONDS + CPU_SECONDS_PER_BYTE * len(line))
        answer = _compiled(tokenizer, *json.loads(line))
        child_processes.end_after(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
