"""A model names its precision: once when it is loaded, and in each result."""

import json
import logging

import pytest
from gguf import GGMLQuantizationType as Type

import specbeam
from specbeam import SpecbeamError
from specbeam.cli import main
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import random_model

SIZES = {"hidden_size": 64, "intermediate_size": 64}


@pytest.fixture(scope="module")
def sources(save, tmp_path_factory):
    file = write_gguf(tmp_path_factory.mktemp("file") / "model.gguf", random_model("llama", **SIZES), kind=Type.Q8_0)
    return {"folder": save(random_model("llama", **SIZES)), "quantized file": file}


@pytest.mark.parametrize(
    ("source", "options", "precision"),
    [
        ("folder", {}, "int8 on cpu"),
        ("folder", {"quantize": "int4"}, "int4 on cpu"),
        ("folder", {"dtype": "float32"}, "float32 on cpu"),
        ("folder", {"dtype": "bfloat16", "backend": "transformers"}, "bfloat16 on cpu"),
        ("quantized file", {}, "Q8_0 on cpu"),
        ("quantized file", {"quantize": "int8"}, "int8 on cpu"),
        ("quantized file", {"dtype": "float32"}, "float32 on cpu"),
    ],
)
def test_precision_is_logged_and_in_the_statistics_and_in_the_name(sources, caplog, source, options, precision):
    with caplog.at_level(logging.INFO, "specbeam"):
        lm = specbeam.load(sources[source], device="cpu", **options)
    of_file = " of this file" if source == "quantized file" else ""
    advice = "" if options else f"; dtype='float32' for transformers' own numbers{of_file}"
    assert caplog.messages == [f"{sources[source]}: {precision}{advice}"]
    assert specbeam.generate(lm, [1], max_new_tokens=1).stats.precision == precision
    assert repr(lm) == f"LanguageModel({str(sources[source])!r}, {precision})"


def begin_anew(monkeypatch):
    """As in a process that begins, without logging."""
    monkeypatch.setattr(logging.getLogger("specbeam"), "propagate", False)
    monkeypatch.setattr(specbeam.models.model, "shown_precisions", set())


def test_a_quantization_that_nobody_asked_for_is_shown_once(sources, capsys, monkeypatch):
    """Without logging set up, on standard error. The draft does not repeat it, and JSON is alone on standard output."""
    begin_anew(monkeypatch)
    target, draft = map(str, sources.values())
    assert main(["generate", "hi", "--json", "--device", "cpu", "--model", target, "--draft", draft]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["stats"]["precision"] == "int8 on cpu"
    shown = [line for line in err.splitlines() if "float32" in line]
    assert shown == [f"specbeam: {target}: int8 on cpu; dtype='float32' for transformers' own numbers"]


def test_each_model_is_shown_once(sources, capsys, monkeypatch):
    begin_anew(monkeypatch)
    for source in [*sources.values(), *sources.values()]:
        specbeam.load(source, device="cpu")
    assert [line.split("; ")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"specbeam: {sources['folder']}: int8 on cpu",
        f"specbeam: {sources['quantized file']}: Q8_0 on cpu",
    ]


def test_a_dtype_that_nobody_knows_is_named_before_a_missing_package(sources, monkeypatch):
    monkeypatch.setattr("specbeam.system.extras.are_installed", lambda *packages: False)
    source = next(iter(sources.values()))
    with pytest.raises(SpecbeamError, match=r"pip install 'specbeam\[torch\]'"):
        specbeam.load(source, dtype="bfloat16")
    with pytest.raises(SpecbeamError, match="unknown dtype 'float64'"):
        specbeam.load(source, dtype="float64")
