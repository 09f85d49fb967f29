"""What openai-whisper makes of attention, written to words.json beside this file. Needs its package, and no weights::

    python tests/speech/record_words.py

A fake model stands in for Whisper. Its scores of attention follow the audio at a speed that a case sets.
"""

import json
from pathlib import Path

import numpy as np

BEGIN, NO_TIMES, END = [258, 259, 260], 300, 256
"""Tokens below 256 are bytes."""
HEADS = 3


def case(*segments, speeds=(3,), seek=0, frames=200, last=0.0, language="en", seed=1):
    """Segments have a start and an end in seconds, and a text. Speeds are positions per token, in turns."""
    listed = [{"start": start, "end": end, "text": text} for start, end, text in segments]
    how = {"speeds": [*speeds], "seek": seek, "frames": frames, "last": last, "language": language, "seed": seed}
    return {"segments": listed, **how}


CASES = [
    case((0.0, 2.0, " And so, my fellow"), (2.0, 3.2, " Americans: ask!"), speeds=(2, 4, 1), frames=340),
    case((5.0, 9.0, " He said: “Hello (you)”. Why? I'm"), speeds=(1, 1, 9, 2), seek=500, frames=450, last=1.0),
    case((0.0, 8.0, " a bc. d e f g"), (8.0, 9.98, " no... Yes"), speeds=(2, 3, 40, 1), frames=998, seed=2),
    case(
        (30.52, 33.0, " one two"), (33.0, 35.0, " three"), speeds=(60, 2, 3), seek=3052, frames=700, last=29.0, seed=3
    ),
    case((0.0, 3.0, "こんにちは、世界。"), speeds=(2, 1, 3), frames=300, language="ja"),
    case(
        (0.0, 3.0, " caf\xe9 na\xefve ¿qu\xe9?"),
        (3.0, 3.0, ""),
        (3.0, 4.0, " \U0001f600 ok"),
        speeds=(4, 2),
        frames=411,
    ),
    case((0.0, 1.0, " "), frames=100),
    case((0.0, 1.0, ""), frames=100),
    case((0.0, 0.06, " hm hm"), frames=6),
    case((12.0, 40.0, " the end"), speeds=(90, 5, 3, 100), seek=1200, frames=3000, last=12.0, seed=4),
]


def bytes_of(text):
    return [*text.encode()]


def text_of(tokens):
    return bytes(token for token in tokens if token < END).decode(errors="replace")


def scores_of(one):
    """Of attention, before the softmax, float32 [heads, tokens, positions of the whole window]."""
    text = [token for segment in one["segments"] for token in bytes_of(segment["text"])]
    rows = len(BEGIN) + 1 + len(text) + 1
    steps = np.resize(one["speeds"], rows)
    centers = np.cumsum(steps) - steps[0]
    head, row, place = np.ogrid[:HEADS, :rows, :1500]
    near = 6.0 * np.exp(-(((place - centers[row]) / 4.0) ** 2))
    return (near + np.sin(one["seed"] * 12.9 + head * 78.2 + row * 37.7 + place * 4.1)).astype(np.float32)


def logits_of(one, rows):
    """float32 [rows, tokens]"""
    row, token = np.ogrid[:rows, :301]
    return (3.0 * np.sin(one["seed"] * 7.1 + row * 5.3 + token * 1.7)).astype(np.float32)


def main():
    import torch
    from whisper.timing import add_word_timestamps, dtw_cpu
    from whisper.tokenizer import Tokenizer

    class Cross(torch.nn.Module):
        def __init__(self, scores):
            super().__init__()
            self.scores = scores

        def forward(self):
            return None, torch.tensor(self.scores)[None]

    class Model:
        device = "cpu"

        def __init__(self, one):
            self.one = one
            block = type("Block", (), {"cross_attn": Cross(scores_of(one))})
            self.decoder = type("Decoder", (), {"blocks": [block]})
            self.dims = type("Dims", (), {"n_text_layer": 1})
            self.alignment_heads = torch.ones(1, HEADS, dtype=torch.bool).to_sparse()

        def __call__(self, mel, tokens):
            self.decoder.blocks[0].cross_attn()
            return torch.tensor(logits_of(self.one, tokens.shape[1]))[None]

    class Bytes(Tokenizer):
        eot, no_timestamps, sot_sequence = END, NO_TIMES, BEGIN

        def __init__(self, language):
            self.language = language

        def decode_with_timestamps(self, tokens, **_):
            return b"".join(bytes([t]) if t < END else b"<|end|>" for t in tokens).decode(errors="replace")

    words = []
    for one in CASES:
        made = [{**s, "tokens": bytes_of(s["text"]), "seek": one["seek"]} for s in one["segments"]]
        add_word_timestamps(
            segments=made,
            model=Model(one),
            tokenizer=Bytes(one["language"]),
            mel=torch.zeros(1),
            num_frames=one["frames"],
            last_speech_timestamp=one["last"],
        )
        names = ("word", "start", "end", "probability")
        words.append([[s["start"], s["end"], [[w[name] for name in names] for w in s["words"]]] for s in made])
    rng = np.random.default_rng(0)
    paths = []
    for shape in ((1, 1), (1, 6), (6, 1), (4, 9), (9, 4), (12, 30), (20, 20)):
        costs = rng.integers(-3, 3, shape)  # with many ties
        paths.append({"costs": costs.tolist(), "path": dtw_cpu(costs.astype(float)).tolist()})
    recorded = {"cases": CASES, "words": words, "paths": paths}
    text = json.dumps(recorded, ensure_ascii=False, default=float, separators=(",", ":"))
    Path(__file__).with_name("words.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
