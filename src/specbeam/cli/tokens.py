"""``specbeam tokens``: how a model's tokenizer sees a text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from specbeam.cli.arguments import add_revision_to, add_source_to, check_source, typed_text
from specbeam.cli.printing import json_line
from specbeam.cli.prompts import read_rows
from specbeam.errors import SpecbeamError


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "tokens",
        help="show how a model's tokenizer sees a text",
        description="Show the tokens of a text. Each has its id, its piece as the vocabulary writes it, the text it "
        "stands for, and the characters [start, end) it comes from. A text b'...' is bytes that are no whole "
        "character. Weights are not read.",
    )
    parser.add_argument("text", metavar="TEXT", help="the text; - reads it from standard input")
    add_source_to(parser)
    add_revision_to(parser)
    parser.add_argument(
        "--chat",
        action="store_true",
        help="apply the model's chat template, as generate does, and show the whole prompt",
    )
    about = "with --chat, a system message to put first"
    parser.add_argument("--system", type=typed_text, metavar="TEXT", help=about)
    parser.add_argument(
        "--special",
        action=argparse.BooleanOptionalAction,
        help="let the tokenizer add its special tokens (default, but not with --chat, as in generate)",
    )
    parser.add_argument("--json", action="store_true", help="print only a JSON list")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.system is not None and not args.chat:
        raise SpecbeamError("--system goes with --chat")
    text = next(read_rows(args.text, None)).prompt
    if not text:
        raise SpecbeamError("the text is empty: give at least one character")
    check_source(args.model)

    from specbeam.checkpoints import locate, open_checkpoint
    from specbeam.models.prompts import render

    tokenizer = open_checkpoint(locate(args.model, args.revision)).tokenizer
    if tokenizer is None:
        raise SpecbeamError(f"{args.model} has no tokenizer")
    if args.chat:
        if not tokenizer.chat_template:
            raise SpecbeamError(f"{args.model} has no chat template: leave out --chat")
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        text = render(tokenizer, [*system, {"role": "user", "content": text}])
    tokens = list(tokens_of(tokenizer, text, not args.chat if args.special is None else args.special))
    if args.json:
        print(json_line(tokens, default=escaped))
    else:
        print(*table(tokens), sep="\n")
        print(f"[{len(tokens)} tokens, {len(text)} characters]", file=sys.stderr)
    if not tokenizer.is_fast:
        print(f"specbeam: {type(tokenizer).__name__} is a slow tokenizer: it has no offsets", file=sys.stderr)
    return 0


def tokens_of(tokenizer: Any, text: str, add_special_tokens: bool) -> Iterator[dict[str, Any]]:
    """The tokens of a text as plain data.

    "offsets" are the tokenizer's own, in characters (code points), or None from a slow tokenizer. "text" is bytes if
    they are no whole character. "unknown" marks the token for words that the vocabulary lacks.
    """
    from specbeam.models.prompts import tokenize
    from specbeam.text.tokenizer import text_of

    details = {"return_offsets_mapping": tokenizer.is_fast, "return_special_tokens_mask": True}
    seen = tokenize(tokenizer, text, add_special_tokens, **details)
    pieces = tokenizer.convert_ids_to_tokens(seen["input_ids"])
    offsets = seen["offset_mapping"] if tokenizer.is_fast else [None] * len(pieces)
    added_tokens = tokenizer.added_tokens_decoder  # outside the vocabulary, and written literally
    every = zip(seen["input_ids"], pieces, offsets, seen["special_tokens_mask"], strict=True)
    for position, (i, piece, span, added) in enumerate(every):
        if piece is None:
            raise SpecbeamError(f"the tokenizer gave the token id {i}, which its own vocabulary lacks: it is damaged")
        # In many vocabularies the token for unknown words also ends texts, and a text may spell it out.
        spelt = span is not None and text[slice(*span)].strip() == piece
        yield {
            "position": position,
            "id": i,
            "piece": piece,
            "text": piece if i in added_tokens else text_of(tokenizer, i, piece),
            "offsets": span,
            "special": i in added_tokens and added_tokens[i].special,
            "unknown": i == tokenizer.unk_token_id and not added and not spelt,
        }


def escaped(written: bytes) -> str:
    return written.decode(errors="backslashreplace")


def table(tokens: list[dict[str, Any]]) -> Iterator[str]:
    """One line per token. The columns that may be wide come last."""
    pieces = ["".join(c if c.isprintable() else repr(c)[1:-1] for c in token["piece"]) for token in tokens]
    width = max(map(len, pieces), default=0)
    yield f"{'position':>8}  {'id':>7}  {'offsets':>14}  {'':7}  {'piece':{width}}  text"
    for token, piece in zip(tokens, pieces, strict=True):
        offsets = "-" if token["offsets"] is None else "[{}, {})".format(*token["offsets"])
        mark = "unknown" if token["unknown"] else "special" if token["special"] else ""
        yield (f"{token['position']:8}  {token['id']:7}  {offsets:>14}  {mark:7}  {piece:{width}}  {token['text']!r}")
