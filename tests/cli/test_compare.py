"""``specbeam compare``: the table, the texts, and the answers to wrong input."""

import json

import pytest

import specbeam
from specbeam.cli import compare
from specbeam.engine.costs import nominal_cost

DEFAULT = ["greedy", "speculative", "beam", "speculative-beam"]


@pytest.fixture
def run(folder, specbeam_command):
    return lambda *arguments, model=folder: specbeam_command("compare", *arguments, "--model", model)


@pytest.fixture
def shown(run):
    """The output of a command that succeeds and has nothing to complain of."""

    def shown(*arguments):
        status, out, err = run(*arguments)
        assert (status, err) == (0, "")
        return out

    return shown


def tables(out):
    """Each table printed: the cells below each heading, by strategy."""
    found = []
    for line in out.splitlines():
        if line.startswith("strategy "):
            names = line.replace("target passes", "target").replace("draft passes", "draft").split()
            found.append({})
        elif line.split(" ")[0] in compare.TWINS and not line.endswith(":"):
            cells = line.replace(" of ", "/").split()
            if len(cells) == 8:
                found[-1][cells[0]] = dict(zip(names[1:], cells[1:], strict=True))
    return found


def test_the_table_has_the_results_of_the_library_and_equal_texts_come_once(shown, model, give_costs):
    give_costs(nominal_cost)  # so that drafts save time
    out = shown("hello hello hello", "--max-new-tokens", "20")
    (table,) = tables(out)
    assert list(table) == DEFAULT
    assert [table[name]["identical"] for name in DEFAULT] == ["-", "yes", "-", "yes"]
    assert "\ndraft: ngram\n" in out
    assert max(map(len, out.splitlines())) <= compare.LINE_WIDTH
    one = specbeam.generate(model, "hello hello hello", max_new_tokens=20)
    beams = specbeam.generate(model, "hello hello hello", max_new_tokens=20, num_beams=4)
    for name, plain in zip(DEFAULT, [one, one, beams, beams], strict=True):
        assert float(table[name]["log-prob"]) == pytest.approx(plain.sequences[0].log_prob, abs=1e-3)
        assert table[name]["draft"] == "0"
    assert [table["greedy"][name] for name in ("target", "steps/pass", "accepted")] == ["20", "1.00", "-"]
    assert table["speculative"]["accepted"].endswith("%")
    assert one.text != beams.text
    assert out.count("\ngreedy, speculative:\n") == out.count("\nbeam, speculative-beam:\n") == 1


def test_several_texts_are_numbered(shown, model):
    several = ("--num-beams", "3", "--num-return-sequences", "2")
    out = shown("hi", "--strategies", "beam", "--max-new-tokens", "4", *several)
    expected = specbeam.generate(model, "hi", num_beams=3, num_return_sequences=2, max_new_tokens=4).sequences
    for number, sequence in enumerate(expected, 1):
        assert f"\n  [{number} of 2, score {sequence.score:.4f}, log-prob {sequence.log_prob:.3f}, length]\n" in out


def test_json_is_the_results_and_nothing_else(shown, model):
    names = "speculative_beam, sample,beam,speculative"
    asked = ["--json", "--max-new-tokens", "9", "--num-beams", "3", "--num-return-sequences", "2", "--top-k", "5"]
    out = shown("hi", "you", "--strategies", names, *asked, "--seed", "7", "--num-draft-tokens", "2")
    for prompt, line in zip(["hi", "you"], out.splitlines(), strict=True):
        got = json.loads(line)
        assert list(got) == ["prompt", "draft", "strategies"]
        assert (got["prompt"], got["draft"]) == (prompt, "ngram")
        same = {name: result["identical"] for name, result in got["strategies"].items()}
        assert same == {"speculative": None, "beam": None, "speculative-beam": True, "sample": None}
        for name, options in {
            "beam": {"num_beams": 3, "num_return_sequences": 2},
            "sample": {"do_sample": True, "top_k": 5, "seed": 7},
        }.items():
            expected = [s.token_ids for s in specbeam.generate(model, prompt, max_new_tokens=9, **options).sequences]
            assert [s["token_ids"] for s in got["strategies"][name]["sequences"]] == expected


def test_without_a_speculative_strategy_no_draft_is_named(shown):
    assert "draft:" not in shown("hi", "--strategies", "greedy,sample", "--max-new-tokens", "4")
    assert json.loads(shown("hi", "--strategies", "greedy", "--max-new-tokens", "4", "--json"))["draft"] is None


def test_several_prompts_end_with_means(shown, folder):
    """The draft model is the target model."""
    drafting = ("--draft", folder, "--num-draft-tokens", "3")
    out = shown("hello hello", "x", "--strategies", "greedy,speculative", "--max-new-tokens", "10", *drafting)
    first, second, means = tables(out)
    assert f"\ndraft: {folder}\n" in out
    assert int(first["speculative"]["draft"]) > 0
    assert first["speculative"]["identical"] == "yes"
    assert "\nmeans of n=2 prompts, each run once per strategy\n" in out
    assert "No difference of speed is settled by single runs" in out
    assert (means["greedy"]["identical"], means["speculative"]["identical"]) == ("-", "2/2")
    scores = [float(table["greedy"]["log-prob"]) for table in (first, second)]
    assert float(means["greedy"]["log-prob"]) == pytest.approx(sum(scores) / 2, abs=2e-3)


def test_a_difference_is_reported(shown, monkeypatch):
    monkeypatch.setitem(compare.TWINS, "sample", "greedy")
    arguments = ("hi", "--strategies", "greedy,sample", "--temperature", "50", "--max-new-tokens", "30", "--seed", "1")
    out = shown(*arguments)
    assert tables(out)[0]["sample"]["identical"] == "differs"
    for text in ("sample differs from greedy: a near-tie", "greedy:\n", "sample:\n"):
        assert f"\n{text}" in out
    assert json.loads(shown(*arguments, "--json"))["strategies"]["sample"]["identical"] is False


def test_studies_and_comparisons_have_one_set_of_names(shown):
    out = shown("hi", "--methods", "speculative-beam", "--max-new-tokens", "4", "--json")
    assert [*json.loads(out)["strategies"]] == ["speculative-beam"]


def test_ctrl_c_keeps_the_printed_lines(run, terminal):
    screen = terminal(interrupt_at="greedy ")
    status, _, err = run("hi", "--max-new-tokens", "5")
    assert status == 130
    assert err == "specbeam: interrupted: 0 of 1 prompts are finished; the same command begins again\n"
    lines = screen.text().splitlines()
    assert lines[:3] == ["prompt: hi", "draft: ngram", ""]
    assert [line.split()[0] for line in lines[3:]] == ["strategy", "greedy"]


def test_ctrl_c_shows_the_means_of_the_finished_prompts(run, monkeypatch):
    check = specbeam.generate

    def interrupted(lm, prompt, **how):
        if prompt == "three":
            raise KeyboardInterrupt
        return check(lm, prompt, **how)

    monkeypatch.setattr("specbeam.api.generation.generate", interrupted)
    status, out, err = run("one", "two", "three", "four", "--strategies", "greedy", "--max-new-tokens", "4")
    assert status == 130
    assert err == "specbeam: interrupted: 2 of 4 prompts are finished; give only the others to go on\n"
    assert "means of n=2 prompts" in out
    assert len(tables(out)[-1]) == 1
