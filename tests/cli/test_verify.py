"""``specbeam verify``: saved results come again, and it says so if they do not."""

import json
import shutil

import pytest

import specbeam
from specbeam import Choice, Engine, Grammar, JsonSchema, Regex, TokenTrie
from specbeam.backends.cpu import CpuBackend
from specbeam.recording.receipts import Saved
from specbeam.results import receipt_of
from tests.backends.test_cpu import ALIKE, loaded
from tests.backends.test_encoder_decoder import make
from tests.conftest import random_model, rewrite

REQUESTS = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.4},
    "samples": {"temperature": 0.9, "top_p": 0.8, "num_return_sequences": 2},  # the seed is drawn, and saved
    "a schema": {"constraint": JsonSchema({"enum": ["äß", 1, None, {"a": []}]}, whitespace=True), "num_beams": 3},
    "an expression": {"constraint": Regex("[ab]{3}"), "temperature": 1.0},
    "a grammar": {"constraint": Grammar('root ::= "x" [0-9]{2}')},
    "a choice": {"constraint": Choice(["red", "green"])},
    "edits": {"logit_bias": {5: float("-inf"), 7: 1.5}, "bad_words_ids": [[3, 4]], "stop_strings": ["q", "zz"]},
}


@pytest.fixture
def verify(specbeam_command, tmp_path):
    """Write results to a file and run the command on it. Returns the status, the verdicts and the errors."""

    def verify(*results, arguments=()):
        path = tmp_path / "results.jsonl"
        path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in results))
        status, out, err = specbeam_command("verify", str(path), *arguments)
        return status, [line.removeprefix(f"{path} line ") for line in out.splitlines()], err

    return verify


def changed(result, *path, to):
    """A saved result with another value at a place, as JSON."""
    copy = json.loads(json.dumps(result))
    place = copy
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = to
    return copy


def signed(saved):
    """A saved result with the receipt of its content."""
    read = Saved.read(saved)
    first = {name: saved["sequences"][0][name] for name in ("text", "token_ids", "finish_reason")}
    return saved | first | {"receipt": receipt_of(read.inputs, read.sequences)}


def test_results_of_every_kind_come_again(verify, model):
    results = [specbeam.generate(model, [5, 6, 7], options, max_new_tokens=12) for options in REQUESTS.values()]
    status, verdicts, err = verify(*(result.to_dict() for result in results))
    assert status == 0, verdicts
    assert len(verdicts) == len(results)
    assert all("and each bit of the scores" in verdict for verdict in verdicts)
    assert "[8 of 8 results are the same]" in err


def test_a_constraint_is_a_part_of_the_receipt(verify, model):
    """A compiled one is saved as its description, too."""
    first, second = Regex("[ab]{2}"), Regex("[ab]{2,3}")
    compiled = first.compile(model)
    made = [specbeam.generate(model, [5], max_new_tokens=2, constraint=one) for one in (first, compiled, second)]
    assert made[0].receipt == made[1].receipt != made[2].receipt
    saved = made[0].to_dict()
    assert saved["inputs"]["objects"] == []
    for pattern, says in (("[ab]{2,3}", "it was changed after it was made"), ("[cd]{2}", "different: token 1 is ")):
        wrong = changed(saved, "inputs", "options", "constraint", "regex", "pattern", to=pattern)
        status, (verdict,), _ = verify(signed(wrong) if "different" in says else wrong)
        assert status == 1
        assert says in verdict


def test_a_draft_or_a_batch_changes_no_receipt_and_anything_else_does(model, folder, tmp_path):
    for options in REQUESTS.values():
        how = {**options, "max_new_tokens": 12}
        if "temperature" in options:  # several samples have no draft
            how |= {"num_return_sequences": 1, "seed": 5}
        plain = specbeam.generate(model, [5, 6, 7], how)
        drafted = specbeam.generate(model, [5, 6, 7], how, draft="ngram", num_draft_tokens=3)
        _, beside = specbeam.generate(model, [[5, 6, 8], [5, 6, 7]], how)
        assert drafted.receipt == beside.receipt == plain.receipt
    shutil.copytree(folder, tmp_path / "other")
    rewrite(tmp_path / "other", "generation_config.json", repetition_penalty=1.1)
    receipts = [
        plain.receipt,
        specbeam.generate(model, [5, 6, 8], how).receipt,
        specbeam.generate(model, [5, 6, 7], how, max_new_tokens=11).receipt,
        specbeam.generate(specbeam.load(folder, quantize="int4"), [5, 6, 7], how).receipt,
        specbeam.generate(specbeam.load(tmp_path / "other"), [5, 6, 7], how).receipt,
    ]
    assert len({*receipts}) == 5
    assert plain.receipt.startswith(f"specbeam {specbeam.__version__} weights={model.weights[:16]} prompt=")


@pytest.mark.parametrize("isa", ALIKE)
def test_a_result_comes_again_on_another_instruction_set(folder, model, isa):
    for options in REQUESTS.values():
        saved = Saved.read(
            json.loads(json.dumps(specbeam.generate(model, [5, 6, 7], options, max_new_tokens=12).to_dict()))
        )
        other = saved.prepare(loaded(folder, isa=isa))
        again = specbeam.generate(other, saved.inputs["prompt_ids"], saved.options)
        verdict, is_same = saved.verdict(again)
        assert is_same, verdict
        assert verdict.endswith("and each bit of the scores")


def test_what_differs_is_named(verify, model, save):
    result = specbeam.generate(model, [5, 6, 7], max_new_tokens=6, num_beams=2, num_return_sequences=2).to_dict()
    ids = result["sequences"][1]["token_ids"]
    other = signed(changed(result, "sequences", 1, "token_ids", 2, to=(ids[2] + 1) % 250))
    shorter = signed(changed(result, "sequences", 0, "token_ids", to=result["token_ids"][:-1]))
    of_old = signed(changed(other, "inputs", "specbeam", to="0.0.9"))
    score = changed(result, "sequences", 0, "score", to=-1.25)
    edited = changed(result, "sequences", 0, "token_ids", 0, to=1)
    text = signed(changed(result, "sequences", 0, "text", to="another"))
    shown = changed(result, "text", to="another")
    status, verdicts, err = verify(result, other, shorter, of_old, score, edited, text, shown)
    assert status == 1
    assert verdicts == [
        "1: the same 12 tokens, and each bit of the scores",
        f"2: different: token 3 of sequence 2 is {(ids[2] + 1) % 250} there and {ids[2]} here",
        f"3: different: token 6 of sequence 1 is missing there and {result['token_ids'][5]} here",
        f"4: different: token 3 of sequence 2 is {(ids[2] + 1) % 250} there and {ids[2]} here (made by specbeam 0.0.9)",
        f"5: the same 12 tokens, but the score of sequence 1 is -1.25 there and {result['sequences'][0]['score']} here",
        "6: cannot be made again: it was changed after it was made, since its receipt belongs to another content",
        f"7: different: the text of sequence 1 is 'another' there and {result['text']!r} here, of the same tokens",
        "8: cannot be made again: it was changed after it was made, since its receipt belongs to another content",
    ]
    assert "[1 of 8 results are the same]" in err
    elsewhere = str(save(random_model("llama", seed=1)))
    status, verdicts, _ = verify(result, arguments=("--model", elsewhere))
    assert status == 1
    assert verdicts[0].startswith("1: cannot be made again: the weights are others: ")
    assert verdicts[0].endswith("Give the same model with --model, --adapter and --revision")


def test_what_no_file_can_hold_or_was_cut_short_is_not_made_again(verify, model):
    trie = specbeam.generate(model, [5, 6, 7], constraint=TokenTrie([[1, 2]]))
    function = specbeam.generate(model, [5, 6, 7], max_new_tokens=3, logits_processor=lambda ids, scores: scores)
    engine = Engine(model)
    request = engine.submit([5, 6, 7], {"max_new_tokens": 20})
    engine.step()
    request.cancel()
    engine.run()
    status, verdicts, _ = verify(*(result.to_dict() for result in (trie, function, request.result())))
    assert status == 1
    assert verdicts == [
        "1: cannot be made again: it was made with constraint, which no file can hold",
        "2: cannot be made again: it was made with logits_processor, which no file can hold",
        "3: cannot be made again: it was cut short (cancelled), and no other run ends there",
    ]


def test_a_file_may_be_one_json_value_and_the_tokens_scores_count(verify, model):
    result = specbeam.generate(model, [5, 6, 7], max_new_tokens=3, top_logprobs=1).to_dict()
    assert verify(json.dumps(result, indent=2))[0] == 0
    wrong = changed(result, "sequences", 0, "log_probs", 1, to=-9.5)
    status, (first, second), _ = verify(json.dumps([result, wrong], indent=2))
    assert status == 1
    assert first.endswith("result 1: the same 3 tokens, and each bit of the scores")
    assert "but the log_prob of token 2 of sequence 1 is -9.5 there and" in second


def test_a_model_that_cannot_be_loaded_stops_no_other_result(verify, model):
    result = specbeam.generate(model, [5, 6, 7], max_new_tokens=2).to_dict()
    gone = changed(result, "inputs", "model", to="no/such/model.gguf")
    unknown = changed(result, "inputs", "backend", to="abacus")
    status, verdicts, _ = verify(gone, result, unknown)
    assert status == 1
    assert verdicts == [
        "1: cannot be made again: --model says where a model is here: there is no file or folder no/such/model.gguf",
        "2: the same 2 tokens, and each bit of the scores",
        "3: cannot be made again: --model says where a model is here: unknown backend 'abacus': give auto, cpu, torch, "
        "transformers",
    ]
    of_torch = specbeam.generate(specbeam.load(model.source, backend="torch"), [5, 6, 7], max_new_tokens=2).to_dict()
    status, verdicts, _ = verify(of_torch, arguments=("--threads", "2"))
    assert (status, "threads=2 is for the cpu backend" in verdicts[0]) == (1, True)


def test_a_receipt_knows_the_configuration_the_numbers_and_the_start(verify, folder, save, tmp_path):
    """Files with equal weights may be different models."""
    path = shutil.copytree(folder, tmp_path / "model")
    receipts = set()
    for theta in (10_000.0, 500.0):
        rewrite(path, "config.json", rope_parameters={"rope_type": "default", "rope_theta": theta})
        for how in ({"backend": "cpu"}, {"backend": "torch"}, {"backend": "torch", "dtype": "bfloat16"}):
            receipts.add(specbeam.generate(specbeam.load(path, **how), [5], max_new_tokens=1).receipt)
    assert len(receipts) == 6
    encoder_decoder = save(make("bart"))
    result = specbeam.generate(specbeam.load(encoder_decoder), [5, 6, 7], max_new_tokens=3).to_dict()
    assert verify(result)[0] == 0
    start = result["inputs"]["start_token_ids"]
    rewrite(encoder_decoder, "generation_config.json", decoder_start_token_id=start[0] + 1)
    _, verdicts, _ = verify(result)
    assert f"its texts began with the tokens {start}, and now [{start[0] + 1}] do" in verdicts[0]


def test_biases_of_a_checkpoint_are_saved_as_json(verify, folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "model")
    rewrite(path, "generation_config.json", sequence_bias=[[[5], 2.0], [[6, 7], float("-inf")]])
    result = specbeam.generate(specbeam.load(path), [5, 6, 7], max_new_tokens=6).to_dict()
    assert "Infinity" not in json.dumps(result)
    assert verify(result)[0] == 0
    wrapped = random_model("llama")
    wrapped.generation_config.sequence_bias = {(5,): 2.0, (6, 7): -1.0}
    own = specbeam.generate(specbeam.hf.wrap(wrapped), [5, 6, 7], max_new_tokens=2)
    assert json.loads(json.dumps(own.to_dict()))["receipt"] is None


def test_settings_of_the_checkpoint_are_those_of_the_first_run(verify, folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "model")
    rewrite(path, "generation_config.json", repetition_penalty=1.3, suppress_tokens=[5, 6], min_new_tokens=4)
    results = [
        specbeam.generate(specbeam.load(path, backend=backend), [5, 6, 7], max_new_tokens=9, **options).to_dict()
        for backend, options in (("cpu", {}), ("cpu", {"num_beams": 2}), ("torch", {}))
    ]
    rewrite(path, "generation_config.json", repetition_penalty=..., suppress_tokens=..., eos_token_id=9)
    status, verdicts, _ = verify(*results)
    assert status == 0, verdicts


def test_wrong_files_are_refused_in_one_line(verify, model, specbeam_command, tmp_path, monkeypatch):
    monkeypatch.setattr(CpuBackend, "__init__", None)  # nothing is loaded for them
    result = specbeam.generate(model, [5, 6, 7], max_new_tokens=2).to_dict()
    plain = {name: value for name, value in result.items() if name != "inputs"}
    constraints = (
        (3, "3 is no description of a constraint"),
        ({"regex": {"pattern": "a"}, "choice": {"texts": ["a"]}}, "is no description of a constraint"),
        ({"regexp": {"pattern": "a"}}, "is no description of a constraint"),
        ({"regex": {"flags": "a"}}, "is no description of a constraint"),
        ({"choice": {"texts": 3}}, "is no description of a constraint"),
        ({"json_schema": {"schema": {"not": {}}}}, "the JSON schema cannot be enforced"),
    )
    for wrong, says in (
        ("{", "line 1 is not JSON"),
        ("", "holds no results"),
        ("[1]\n", "[1] is no JSON object"),
        (plain, 'it has no "inputs" to make it again from'),
        (changed(result, "inputs", to=3), 'its "inputs" is 3'),
        (changed(result, "inputs", "format", to=99), "its inputs have the form 99"),
        (changed(result, "inputs", "prompt_ids", to=[1, "x"]), "its \"prompt_ids\" has 'x'"),
        (changed(result, "inputs", "options", to={"top_q": 1}), "unknown option 'top_q'"),
        *((changed(result, "inputs", "options", to={"constraint": to}), says) for to, says in constraints),
        (changed(result, "sequences", 0, "score", to=None), 'its "score" is None'),
        (changed(result, "sequences", 0, "score", to=10**400), "a score is beyond all numbers"),
        (changed(result, "sequences", 0, "log_probs", to=[-1.0]), 'not as many "log_probs" as tokens'),
    ):
        status, verdicts, err = verify(wrong)
        assert (status, verdicts) == (2, []), (wrong, err)
        assert says in err
        assert len(err.splitlines()) == 1
    assert specbeam_command("verify", str(tmp_path / "nowhere.jsonl"))[0] == 2
