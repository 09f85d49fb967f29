"""Record the run that the page begins with, on the model of ``specbeam demo``: its first example.

    python docs/page/tour.py

It is what ``specbeam generate --record`` writes, with fewer likeliest tokens, and ``plain_passes`` in the first event:
the passes of the same search without a draft.
"""

from pathlib import Path

import specbeam
from specbeam.models.prompts import encode
from specbeam.options.options import Options
from specbeam.recording.events import event_line, events

FILE = Path(specbeam.__file__).parent / "page/tour.jsonl"
MODEL = "smollm2-135m-instruct"
PROMPT = 'Repeat this: "The tea is in the red box, the sugar is in the blue box, and the coffee is in the green box."'
SEARCH = {"num_beams": 3, "max_new_tokens": 64}
DRAFT = {"num_draft_tokens": 6, "draft_width": 3}
LIKELIEST = 3
"""Tokens at each position. The file is small, and a tip shows what matters."""


def main() -> None:
    lm = specbeam.load(MODEL, backend="cpu")
    plain = specbeam.generate(lm, PROMPT, Options(**SEARCH))
    options = Options(**SEARCH, **DRAFT, trace=True, top_logprobs=LIKELIEST)
    result = specbeam.generate(lm, PROMPT, options, draft="ngram")
    assert result.token_ids == plain.token_ids
    prompt_ids = encode(lm, PROMPT)
    begin, *rest = events(lm, prompt_ids, options, "ngram", result, PROMPT)
    begin["plain_passes"] = plain.stats.target_passes
    FILE.write_text("".join(f"{event_line(event)}\n" for event in [begin, *rest]), encoding="utf-8")
    print(
        f"{FILE.name}: {FILE.stat().st_size // 1000} kB, {result.stats.target_passes} passes of {begin['plain_passes']}"
    )


if __name__ == "__main__":
    main()
