"""A model travels by pickle as its source, and a copy of it is itself."""

import os
import pickle
import subprocess
import sys
from copy import copy, deepcopy
from dataclasses import replace

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import specbeam
from specbeam import SpecbeamError
from specbeam.options.generation_defaults import GenerationDefaults
from tests.conftest import random_model

ELSEWHERE = """
import pickle, sys
import specbeam
lm = pickle.load(sys.stdin.buffer)
print(lm.source, lm.precision, lm.backend.threads, specbeam.generate(lm, [5, 6, 7], max_new_tokens=6).token_ids)
"""


def test_a_model_is_loaded_again_in_another_process_and_directory(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder.parent)
    lm = specbeam.load(folder.name, quantize="int8", threads=1)
    data = pickle.dumps(lm)
    assert len(data) < 10_000  # without weights
    there = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}}
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], input=data, capture_output=True, **there)
    new = specbeam.generate(lm, [5, 6, 7], max_new_tokens=6).token_ids
    assert done.stdout.decode() == f"{folder.name} int8 on cpu 1 {new}\n", done.stderr.decode()


def test_an_adapter_and_changed_settings_come_along(folder, tmp_path):
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    how = {"backend": "cpu", "quantize": "float32", "threads": 1}
    lm = specbeam.load(folder, adapter=tmp_path / "adapter", **how)
    assert lm.weights != specbeam.load(folder, **how).weights
    served = replace(lm, source="served", generation_defaults=GenerationDefaults({"top_k": 3}, "a test"))
    again = pickle.loads(pickle.dumps(served))
    assert (again.weights, again.source, again.generation_defaults["top_k"]) == (lm.weights, "served", 3)


def test_other_weights_than_before_are_refused(folder):
    data = pickle.dumps(specbeam.load(folder, backend="cpu", quantize="float32", threads=1))
    random_model("llama", seed=1).save_pretrained(folder)
    with pytest.raises(SpecbeamError, match=r"was pickled with other weights than it has here"):
        pickle.loads(data)


def test_a_copy_is_the_model_itself(lm):
    assert copy(lm) is lm
    assert deepcopy({"model": [lm]})["model"][0] is lm


def test_a_wrapped_model_says_that_it_cannot_travel(tiny):
    wrapped = specbeam.hf.wrap(tiny("llama")[0])
    with pytest.raises(SpecbeamError, match=r"cannot be pickled, because specbeam has not loaded it itself: send its"):
        pickle.dumps(wrapped)
    assert deepcopy(wrapped) is wrapped


def test_errors_of_a_library_travel_whole(lm):
    with pytest.raises(specbeam.PromptTooLong) as caught:
        specbeam.generate(lm, [1] * 300)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.tokens) == (specbeam.PromptTooLong, str(caught.value), "300")
    for kind in (specbeam.NotFinite, specbeam.QueueFull):
        assert str(pickle.loads(pickle.dumps(kind("why")))) == "why"
