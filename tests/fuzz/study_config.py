"""config.yaml of ``specbeam study --config-dir``, and KEY=VALUE words: one per line below a line ``---``."""

from pathlib import Path

import specbeam.study.config
from tests.fuzz.toys import command, room

WORDS = [
    "prompts=[Hi]",
    "decode.mode=[beam,speculative-beam]\ndecode.num_beams=4\ndecode.num_draft_tokens=3",
    "ablation=num_draft_tokens\nprompts=[Hi]",
    "data=spec_bench\ndata.source=x.jsonl\ndata.per_category=2",
    "methods={a:{mode:greedy},b:{mode:speculative-beam,num_beams:2,draft_width:auto}}\nprompts=[Hi]",
    "decode={mode:speculative-beam,num_draft_tokens:3,logit_bias:{5:-1}}\nprompts=[Hi]",
    "~prompts\n+x=1",
    "launcher=ray\nlauncher.cpus=2\nmetrics.confidence=0.9\nprompts=['é',\"b\"]",
]


def seeds() -> list[bytes]:
    packaged = Path(specbeam.study.config.__file__).parent / "conf" / "study.yaml"
    own = "defaults:\n  - _self_\nprompts: [Hi]\ndecode:\n  mode: beam\n  num_beams: ${seed}\nseed: 3\n"
    chosen = "defaults:\n  - override data: none\n  - launcher: local\nprompts: [Hi]\n"
    files = [packaged.read_text(), own, chosen, "prompts:\n- &a Hi\n- *a\nseed: !!int '3'\n"]
    return [*(f"{file}\n---\nseed=1".encode() for file in files), *(f"---\n{words}".encode() for words in WORDS)]


def run(data: bytes) -> None:
    folder = room() / "config-dir"
    folder.mkdir(exist_ok=True)
    file, _, words = data.partition(b"---\n")
    (folder / "config.yaml").write_bytes(file)
    given = [word for word in words.decode(errors="replace").split("\n") if word]
    if "\0" in "".join(given) or any(word.startswith("-") for word in given):  # no argument can hold a zero
        return
    command("study", *given, "--config-dir", str(folder), "--show-config")
