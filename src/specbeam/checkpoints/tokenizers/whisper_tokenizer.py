"""Whisper's tokenizer: GPT-2's, with tokens that begin a transcript, and timestamps that are no part of its text."""

from __future__ import annotations

import re

from specbeam.text.tokenizer import Tokenizer

START, PREVIOUS = "<|startoftranscript|>", "<|startofprev|>"
BEGIN = (START, "<|notimestamps|>")
"""They begin each text."""
TIMESTAMP = re.compile(r"<\|\d+\.\d+\|>")


class WhisperTokenizer(Tokenizer):
    """As transformers' class of this name decodes."""

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The text of token ids, without timestamps. ``skip_special_tokens`` also leaves out the text before it."""
        if skip_special_tokens and ids[:1] == [self._id(PREVIOUS)]:
            start = self._id(START)
            ids = ids[ids.index(start) :] if start in ids else []
        return TIMESTAMP.sub("", super()._decode(ids, skip_special_tokens))
