"""The public names: ``dir``, ``help`` and signatures show them, and ``import specbeam`` stays fast."""

import inspect
import pydoc
import subprocess
import sys
from copy import copy
from dataclasses import replace

import pytest

import specbeam
from specbeam import Options, SpecbeamError
from tests.conftest import needs_torch


@needs_torch
def test_dir_shows_the_public_names_and_there_is_no_other_name():
    shown = {name for name in dir(specbeam) if not name.startswith("__")}
    modules = {"constraints", "hf", "labels", "ladder", "reference", "scoring", "speech"}
    assert shown - {"lm_eval"} == {*specbeam.__all__, *modules}  # lm_eval if a test has imported it
    assert all(getattr(specbeam, name) for name in shown)
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        specbeam.generat  # noqa: B018


def test_help_shows_functions_and_classes_with_their_signatures():
    shown = pydoc.plain(pydoc.render_doc(specbeam))
    for name in ("generate", "stream", "nbest", "load", "show_prompt"):
        assert f"\n    {name}(" in shown
    for name in ("Engine", "LanguageModel", "Options", "Result", "TokenTrie"):
        assert f"\n    class {name}(" in shown
    assert "num_beams: int = 1" in shown


@pytest.mark.parametrize("function", [specbeam.generate, specbeam.stream, specbeam.nbest])
def test_signatures_have_the_options_with_types_and_defaults(function):
    parameters = inspect.signature(function).parameters
    assert [*parameters][:7] == ["lm", "prompt", "options", "system", "raw", "draft", "strategy"]
    assert {*inspect.signature(Options).parameters} <= {*parameters}
    assert (parameters["max_new_tokens"].default, parameters["max_new_tokens"].annotation) == (256, int)
    assert parameters["top_p"].annotation == float | None


def test_checks_of_keywords_leave_signatures_alone():
    assert [*inspect.signature(specbeam.load).parameters][:3] == ["source", "backend", "device"]
    assert inspect.signature(Options).parameters["num_beams"].annotation == "int"


def test_the_import_is_fast():
    """The command line's help needs the names of the package, but not PyTorch. Nothing but the server needs FastAPI."""
    code = "import sys, specbeam; dir(specbeam); print({'torch', 'numpy', 'transformers'} & {*sys.modules})\n"
    code += "specbeam.cli, specbeam.Engine; print({'fastapi', 'uvicorn'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", f"import specbeam.cli\n{code}"], capture_output=True, text=True)
    assert done.stdout.split("\n") == ["set()", "set()", ""], done.stderr


OPTIONS = {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 2}


@pytest.mark.parametrize("options", [OPTIONS, Options(**OPTIONS)], ids=["mapping", "Options"])
def test_options_come_by_position_too_and_keywords_override_them(lm, options):
    expected = specbeam.generate(lm, [1, 2], **OPTIONS)
    for found in (specbeam.generate(lm, [1, 2], options).sequences, specbeam.nbest(lm, [1, 2], options)):
        assert [one.token_ids for one in found] == [one.token_ids for one in expected.sequences]
    assert [r.token_ids for r in specbeam.generate(lm, [[1, 2]], options)] == [expected.token_ids]
    assert "".join(piece.text for piece in specbeam.stream(lm, [1, 2], options)) == expected.text
    shorter = specbeam.generate(lm, [1, 2], options, max_new_tokens=3)
    assert shorter.token_ids == specbeam.generate(lm, [1, 2], **{**OPTIONS, "max_new_tokens": 3}).token_ids
    assert OPTIONS["max_new_tokens"] == 6  # the mapping is the caller's


def test_nbest_has_four_beams_unless_told_otherwise(lm):
    for options in (None, Options(max_new_tokens=4), {"max_new_tokens": 4}):
        assert len([*specbeam.nbest(lm, [1, 2], options, max_new_tokens=4)]) == 4
    assert len([*specbeam.nbest(lm, [1, 2], Options(num_beams=2), max_new_tokens=4)]) == 2
    for said, count in ({"num_beams": 3, "num_return_sequences": 1}, 1), ({"num_beams": 1}, 1), ({"num_beams": 3}, 3):
        for options in (said, Options(**said), replace(Options(**said), max_new_tokens=4), copy(Options(**said))):
            assert len([*specbeam.nbest(lm, [1, 2], options, max_new_tokens=4)]) == count
    with pytest.raises(SpecbeamError, match="unknown option 'beams': did you mean 'num_beams'"):
        specbeam.nbest(lm, [1, 2], beams=3)


@pytest.mark.parametrize("function", [specbeam.generate, specbeam.stream, specbeam.nbest])
def test_other_values_in_the_place_of_options_are_refused(lm, function):
    for wrong in (64, "Be brief.", [("num_beams", 2)]):
        with pytest.raises(SpecbeamError, match=r"options=.* is not allowed: give Options or a mapping"):
            function(lm, [1, 2], wrong)


WITHOUT_TORCH = """
import sys
sys.modules |= {"torch": None, "transformers": None}
import specbeam
from specbeam.core.callers import call
for statement in sys.argv[1:]:
    try: exec(statement)
    except specbeam.SpecbeamError as error: print(error)
"""


def test_what_needs_the_extra_torch_says_so():
    expected = {
        "specbeam.hf": "specbeam.hf needs torch and transformers",
        "import specbeam.hf": "specbeam.hf needs torch and transformers",
        "from specbeam import ladder": "specbeam.ladder needs torch",
        "import specbeam.ladder": "specbeam.ladder needs torch",
        "call('logits_processor', specbeam.tensors(abs), 'cpu', 1)": "logits_processor of tensors needs torch",
    }
    run = [sys.executable, "-c", WITHOUT_TORCH, *expected]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{why}: pip install 'specbeam[torch]'" for why in expected.values()], (
        done.stderr
    )
