"""Studies of user-defined methods and drafters, from a file in the current directory."""

import json
import sys

import pytest

from specbeam.cli import main
from specbeam.study import results
from tests.cli.test_custom import OWN
from tests.conftest import random_model

pytestmark = pytest.mark.usefixtures("no_plots")
METHODS = (
    "methods={greedy: {mode: greedy}, mine: {mode: greedy, strategy: 'own_methods:shortest'}, "
    "drafted: {mode: speculative, draft_model: 'own_methods:propose', num_draft_tokens: 2}}"
)


@pytest.fixture
def study(save, tmp_path, monkeypatch):
    model = save(random_model("llama", initializer_range=0.1))
    (tmp_path / "own_methods.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    load = ["load.backend=cpu", "load.quantize=float32", "load.threads=1", "metrics.perplexity=[]"]
    few = ["prompts=[hi]", "output=run", "decode.max_new_tokens=4"]
    yield lambda *words: main(["study", f"target_model={model}", *load, *few, *words])
    sys.modules.pop("own_methods", None)


def test_they_are_methods_like_others_and_their_file_belongs_to_the_run(study, tmp_path, capsys):
    assert study(METHODS) == 0, capsys.readouterr().err
    about, records, _ = results.read(tmp_path / "run")
    tokens = {record["method"]: record["token_ids"] for record in records}
    assert tokens["drafted"] == tokens["greedy"]
    assert tokens["mine"] == tokens["greedy"][:1]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [m["agreement"] for m in summary["methods"]][2] == {"twin": "greedy", "same": 1, "of": 1}
    assert {"own_methods:shortest", "own_methods:propose"} < {*about["models"]}
    (tmp_path / "own_methods.py").write_text(OWN + "# changed")
    assert study(METHODS) == 2
    assert "own_methods:propose was" in capsys.readouterr().err


def test_one_strategy_is_one_mode(study, capsys):
    assert study("decode.mode=greedy", "decode.strategy=own_methods:shortest") == 0
    assert study("decode.strategy=own_methods:shortest") == 2
    assert "is one method, and decode.mode has 4: give the mode whose options it takes" in capsys.readouterr().err
    assert study("decode.mode=greedy", "decode.strategy=own_methods:longest") == 2
    assert "has no 'longest'" in capsys.readouterr().err
    assert study("decode.mode=speculative", "draft_model=own_methods:prpose") == 2
    assert "has no 'prpose' (did you mean 'propose'?)" in capsys.readouterr().err
