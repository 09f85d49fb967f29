"""Escapes of texts that are typed: which are read, where, and that files and prompts stay as they are."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbeam import SpecbeamError
from specbeam.cli import main
from specbeam.text.escapes import hint_for_prompt, unescaped

OPTIONS = ("generate", "x", "--raw", "--model", "not/there")


def test_the_escapes():
    assert unescaped(r"a\nb\tc\rd\\e\\n") == "a\nb\tc\rd\\e\\n"
    assert unescaped("a\nb 'é") == "a\nb 'é"


@given(st.text("nt\\x\n"))
def test_a_text_whose_backslashes_are_doubled_is_read_as_it_was(text):
    assert unescaped(text.replace("\\", "\\\\")) == text


@pytest.mark.parametrize("text", [r"\d", r"a\b", "a\\", r"\\\x41", "\\\n"])
def test_other_escapes_are_refused(text):
    with pytest.raises(SpecbeamError, match=r"is no escape: write \\\\ for a backslash"):
        unescaped(text)


def test_stop_strings_and_system_messages_of_a_command_line_are_read(monkeypatch):
    seen = []
    monkeypatch.setattr("specbeam.cli.generate.check_sources", lambda given: seen.append(given) or stop())
    with pytest.raises(SystemExit):
        main([*OPTIONS, "--stop-strings", r"\n", "--stop-strings=a\\tb", "--system", r"One\\two\n"])
    assert (seen[0].stop_strings, seen[0].system) == (["\n", "a\tb"], "One\\two\n")


def stop():
    raise SystemExit


def test_a_wrong_escape_is_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*OPTIONS, "--stop-strings", r"\d"])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert r"argument --stop-strings: \d in '\\d' is no escape" in line


@pytest.mark.parametrize(("prompt", "hinted"), [(r"a\nb", True), ("print('a\\n')\nb", False), ("a\nb", False)])
def test_a_prompt_stays_as_it_is_with_a_hint(prompt, hinted, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("specbeam.cli.generate.options_of_row", lambda _, row: seen.append(row.prompt) or stop())
    with pytest.raises(SystemExit):
        main(["generate", prompt])
    assert seen == [prompt]
    hint = hint_for_prompt(prompt)
    assert capsys.readouterr().err == (f"specbeam: {hint}\n" if hinted else "")
    assert (hint is not None) is hinted


def test_overrides_of_a_study_are_read_and_its_files_are_not(tmp_path):
    pytest.importorskip("hydra")
    from specbeam.study.composition import compose, sweep

    def composed(*words, folder=None):
        return compose(words, folder)

    quoted = composed(r"data.template='Q: {prompt}\n\nA:'", r"decode.stop_strings=['\n',x]", r"data.source='C:\new'")
    assert quoted["data"] == {"template": "Q: {prompt}\n\nA:", "source": r"C:\new"}
    assert quoted["decode"]["stop_strings"] == ["\n", "x"]
    assert composed(r"chat.system_prompt='a\\n'")["chat"]["system_prompt"] == r"a\n"
    assert composed(r"+methods.a={mode: greedy, stop_strings: '\n'}")["methods"]["a"]["stop_strings"] == "\n"
    assert composed(r"prompts=['a\nb']")["prompts"] == [r"a\nb"]
    each = [composed(*words)["data"]["template"] for words, _ in sweep([r"data.template='a\n','b\\n'"])]
    assert each == ["a\n", r"b\n"]
    with pytest.raises(SpecbeamError, match=r"data.template: \\d in "):
        composed(r"data.template='\d'")
    (tmp_path / "config.yaml").write_text(json.dumps({"data": {"template": r"a\n"}, "chat": {"system_prompt": r"b\n"}}))
    both = composed(r"chat.system_prompt='c\n'", folder=tmp_path)
    assert (both["data"]["template"], both["chat"]["system_prompt"]) == (r"a\n", "c\n")
