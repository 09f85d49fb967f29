"""The way from a GGUF file to its text on the cpu backend needs none of the large packages, nor slow modules."""

import json
import subprocess
import sys

from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import random_model

LARGE = {"torch", "transformers", "gguf", "threadpoolctl"}
SLOW = {"asyncio", "tqdm", "filelock", "ssl", "huggingface_hub", "email", "zipfile"}
"""A model that was packed by an earlier start is not to import these. importlib.metadata imports the last two."""
PROGRAM = """
import sys, json
import specbeam
from specbeam.backends.cpu import weights
weights.MIN_FILE_BYTES = 0
lm = specbeam.load(sys.argv[1])
texts = []
for options in (
    {},
    {"raw": True},
    {"num_beams": 4, "draft": "ngram"},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"temperature": 1.0, "seed": 1, "typical_p": 0.9},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "logits_processor": [lambda ids, scores: scores - 1]},
):
    texts.append(specbeam.generate(lm, "Hi", max_new_tokens=8, **options).text)
print(json.dumps([texts, sorted({name.partition(".")[0] for name in sys.modules})]))
"""
COMMAND = """
import sys, json
from specbeam.backends.cpu import weights
from specbeam.cli import main
weights.MIN_FILE_BYTES = 0
assert main(["generate", "Hi", "--max-new-tokens", "8", "--model", sys.argv[1]]) == 0
print(json.dumps([[], sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def run(path, home, program=PROGRAM):
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={"SPECBEAM_HOME": str(home), "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_from_a_gguf_file_to_its_texts(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, random_model("llama"))
    texts, modules = run(path, tmp_path / "home")
    assert LARGE.isdisjoint(modules)
    again, modules = run(path, tmp_path / "home")  # its packed weights are there now
    assert not (LARGE | SLOW).intersection(modules)
    _, modules = run(path, tmp_path / "home", COMMAND)
    assert not (LARGE | SLOW).intersection(modules)
    assert again == texts
    assert all(texts)
