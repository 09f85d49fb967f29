"""Drafts that are named by their source: loaded once, as the target was loaded."""

import pytest

import specbeam
from specbeam import SpecbeamError
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import random_model

PROMPT = [5, 6, 7, 5, 6, 7, 5]


@pytest.fixture(scope="module")
def folder(save):
    return save(random_model("llama", seed=0))


@pytest.fixture
def target(folder):
    return specbeam.load(folder, backend="cpu", quantize="float32", threads=1)


def options(draft):
    sizes = {} if draft is None else {"num_draft_tokens": 2, "draft_width": 1}
    return {"draft": draft, "max_new_tokens": 12} | sizes


@pytest.mark.parametrize("kind", ["folder", "path", "file"])
def test_a_source_drafts_as_the_loaded_model_does(target, folder, tmp_path, kind):
    write_gguf(file := tmp_path / "m.gguf", random_model("llama"))
    source = {"folder": str(folder), "path": folder, "file": str(file)}[kind]
    loaded = specbeam.load(source, backend="cpu", quantize="float32", threads=1)
    results = [specbeam.generate(target, PROMPT, **options(draft)) for draft in (None, loaded, source)]
    assert len({tuple(result.token_ids) for result in results}) == 1
    assert results[1].stats.drafted == results[2].stats.drafted > 0
    assert results[1].stats.accepted == results[2].stats.accepted


def test_a_source_is_loaded_once_and_as_the_target_is(target, folder, monkeypatch, tmp_path):
    draft = target.draft_model(folder)
    assert draft is target.draft_model(str(folder))
    assert (draft.backend.name, draft.backend.quantize, draft.backend.threads) == ("cpu", "float32", 1)
    other = specbeam.load(folder, dtype="bfloat16", device="cpu").draft_model(folder)
    assert (other.backend.name, str(other.backend.dtype)) == ("torch", "torch.bfloat16")


def test_a_source_drafts_for_a_model_of_transformers(folder):
    lm = specbeam.hf.wrap(random_model("llama"))
    results = [specbeam.generate(lm, PROMPT, **options(draft)) for draft in (None, str(folder))]
    assert results[0].token_ids == results[1].token_ids
    assert results[1].stats.drafted > 0


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ("n-gram", 'draft=\'n-gram\': give "ngram", "suffix", "mtp", a model or module:name; unknown model'),
        ("./none.gguf", "there is no file or folder ./none.gguf"),
        (7, "draft=7 is not allowed: give a model or its source"),
    ],
)
def test_another_draft_is_refused_with_the_choices(target, draft, says):
    with pytest.raises(SpecbeamError, match=says):
        specbeam.generate(target, PROMPT, **options(draft))
