"""``specbeam chat``: conversations equal what generate makes of the same messages, and nothing ends them unasked."""

import io
import json
import re
import signal
import sys

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

import specbeam
from specbeam.cli import main
from specbeam.cli.chat import line_reader
from specbeam.models.sampling_defaults import FALLBACK
from tests.backends.test_encoder_decoder import make
from tests.cli.conftest import flags, press_ctrl_c_in
from tests.conftest import CHAT_TEMPLATE, EOS, byte_tokenizer, random_model, rewrite

SHORT = ("--max-new-tokens", "9", "--temperature", "0")
DRAWN = ("--max-new-tokens", "9", "--seed", "5")
INTRODUCTION = re.compile(r"^\S+ (samples|takes|searches) .*\nIt runs on the .*\n", re.MULTILINE)


@pytest.fixture
def chat(folder, specbeam_command, monkeypatch):
    """Say some lines in a chat. Returns its exit status, the answers, and its notes, without the introduction."""

    def chat(*lines, options=SHORT, model=folder, whole=False):
        text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode(errors="surrogateescape"))))
        status, out, err = specbeam_command("chat", "--model", str(model), *options)
        return status, out, err if whole else INTRODUCTION.sub("", err, count=1)

    return chat


def answer(model, messages, question, **options):
    """The answer to a question after these messages, which get both."""
    messages.append({"role": "user", "content": question})
    text = specbeam.generate(model, messages, **{"max_new_tokens": 9} | options).text
    messages.append({"role": "assistant", "content": text})
    return text


def answers(model, *questions, **options):
    """The answers of a conversation in which every turn is generated anew, and its messages."""
    messages = []
    return [answer(model, messages, question, **options) for question in questions], messages


def printed(texts):
    return "".join(f"{text}\n" for text in texts)


def test_every_turn_answers_the_whole_conversation(chat, model):
    status, out, err = chat("hi", "", "and now?", "thanks")
    assert (status, out) == (0, printed(answers(model, "hi", "and now?", "thanks")[0]))
    assert err == "[ended after 9 tokens: /set max_new_tokens 18 allows longer answers]\n" * 3


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "length_penalty": 0.5},
        {"temperature": 0.9, "top_k": 40, "seed": 5},
        {"draft": "ngram", "num_draft_tokens": 2},
        {"system": "Be brief.", "repetition_penalty": 1.3},
    ],
)
def test_options_of_generate_hold_for_every_answer(chat, model, options):
    _, out, _ = chat("hi", "and now?", options=[*SHORT, *flags(**options)])
    options = FALLBACK.fill({"temperature": 0} | options)
    assert out == printed(answers(model, "hi", "and now?", **options)[0])


def test_a_draft_model_drafts_for_every_answer(chat, model, folder):
    draft = ("--draft", folder, "--draft-width", "1", "--num-draft-tokens", "2")
    _, out, err = chat("hi", "and now?", "/stats", options=[*SHORT, *draft])
    assert out == printed(answers(model, "hi", "and now?")[0])
    assert "100% of" in err


def test_statistics_show_what_was_not_read_again(chat, model):
    """The tokens are compared: this template writes the assistant's name in another way once it has answered."""
    _, _, err = chat("/stats", "hi", "/stats", "and now?", "/stats", options=[*SHORT, "--max-new-tokens", "1"])
    _, (*messages, _) = answers(model, "hi", "and now?", max_new_tokens=1)
    first, second = (specbeam.Engine(model).check(messages[:end]) for end in (1, 3))
    common = next(at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    assert 0 < common < len(first)
    assert "there is no answer yet" in err
    assert f"  0 of {len(first)} prompt tokens were cached" in err
    assert f"  {common} of {len(second)} prompt tokens were cached" in err
    assert "all 2 answers: 2 tokens" in err
    assert f"context: {len(second) + 1} of 256 tokens" in err


def test_regenerate_draws_another_answer_in_the_place_of_the_last(chat, model):
    options = FALLBACK.settings | {"seed": 5}
    _, out, _ = chat("hi", "/regenerate", "more", options=DRAWN)
    (first,), _ = answers(model, "hi", **options)
    (second,), messages = answers(model, "hi", **options | {"seed": 6})
    assert first != second
    assert out == printed([first, second, answer(model, messages, "more", **options)])


def test_regenerate_says_that_greedy_answers_stay(chat, model):
    _, out, err = chat("/regenerate", "hi", "/regenerate")
    assert "there is no message yet" in err
    assert out == printed(2 * answers(model, "hi")[0])
    assert "[the same answer, as you do not sample: /temperature 0.7 draws others]" in err


def test_turns_and_system_messages_can_be_changed(chat, model):
    said = ["a", "b", "/drop", "c", "/system Be kind.", "d", "/clear", "e", "/system", "f", "/drop 9", "g"]
    _, out, err = chat(*said)
    (a, b), messages = answers(model, "a", "b")
    del messages[:2]
    c, d = answer(model, messages, "c"), answer(model, messages, "d", system="Be kind.")
    (e,), messages = answers(model, "e", system="Be kind.")
    assert out == printed([a, b, c, d, e, answer(model, messages, "f"), *answers(model, "g")[0]])
    assert "[1 of 2 turns are left]" in err


def test_a_saved_conversation_is_read_by_generate_python_and_load(chat, model, specbeam_command, folder, tmp_path):
    file = tmp_path / "talk.json"
    chat("hi é 你好", "more", f"/save {file}", options=[*SHORT, "--system", "Be brief."])
    saved = json.loads(file.read_text(encoding="utf-8"))
    _, messages = answers(model, "hi é 你好", "more", system="Be brief.")
    assert saved == [{"role": "system", "content": "Be brief."}, *messages]
    status, out, _ = specbeam_command("generate", "--prompts", str(file), "--json", "--model", folder, *SHORT)
    assert (status, json.loads(out)["prompt"]) == (0, saved)

    _, out, _ = chat("other", f"/load {file}", "again", f"/save {file}")
    assert out.endswith(answer(model, saved, "again") + "\n")
    assert json.loads(file.read_text(encoding="utf-8")) == saved


@pytest.mark.parametrize("own", [None, "Be kind."])
def test_a_loaded_conversation_keeps_the_system_message_unless_it_has_its_own(chat, model, tmp_path, own):
    file = tmp_path / "talk.json"
    chat("hi", f"/save {file}", options=[*SHORT, *(("--system", own) if own else ())])
    _, out, _ = chat(f"/load {file}", "more", options=[*SHORT, "--system", "Be brief."])
    messages = [message for message in json.loads(file.read_text("utf-8")) if message["role"] != "system"]
    assert out == printed([answer(model, messages, "more", system=own or "Be brief.")])


def test_a_loaded_question_is_answered(chat, model, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    assert chat(f"/load {tmp_path / 'q.jsonl'}")[1] == printed(answers(model, "hi")[0])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/regen", "unknown command /regen: did you mean /regenerate?"),
        ("/xyz", "unknown command /xyz: /help lists the commands"),
        ("/save talk", "/save talk: give the name of a file that ends with .json"),
        ("/save", "/save : give the name of a file"),
        ("/save /not/there/x.json", "specbeam: /not/there/x.json cannot be written: there is no folder /not/there"),
        ("/save {there}", "specbeam: /save {there}: there is such a file already"),
        ("/load", "/load: give the name of a file"),
        ("/load /not/there.json", "/load /not/there.json: the file cannot be read (No such file or directory)"),
        ("/load {there}", "the file is not JSON"),
        ("/load {wrong}", 'a conversation is a list of messages with "role" and "content"'),
        ("/drop many", "/drop many: give a number of turns, at least 1"),
        ("x" * 300, "tokens, and the context of"),
        ("/set num_predict 5", "specbeam: unknown option 'num_predict': did you mean 'max_new_tokens'?"),
        ("/set top_p 2", "specbeam: top_p=2.0 is not allowed: give over 0 and at most 1 (/set NAME default"),
        ("/set num_beams many", "specbeam: num_beams='many' is not allowed: give an integer"),
        ("/set num_draft_tokens 3", "specbeam: num_draft_tokens=3 has no effect without a draft"),
        ("/temperature hot", "specbeam: temperature='hot' is not allowed: give a number"),
        ("/model nosuch", "specbeam: unknown model 'nosuch'"),
        ("/model {there}", "there.json"),
        *(
            (f"/{command} {name}", f"specbeam: /{command} {name}: the file cannot be {done} (")
            for command, done in {"save": "written", "load": "read"}.items()
            for name in ("~nobody-of-this-name/x.json", f"{'a' * 300}.json", "a\0b.json")
        ),
    ],
)
def test_wrong_input_is_one_line_and_the_chat_goes_on(chat, model, tmp_path, line, says):
    there, wrong = tmp_path / "there.json", tmp_path / "wrong.json"
    there.write_text("{")
    wrong.write_text('[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]')
    status, out, err = chat(line.format(there=there, wrong=wrong), "hi")
    assert (status, out) == (1, printed(answers(model, "hi")[0]))
    assert says.format(there=there) in err
    assert len(err.splitlines()) == 2
    assert there.read_text() == "{"


def test_a_full_context_says_what_to_do(chat, model):
    long, full = "x" * 180, {"max_new_tokens": 500, "min_new_tokens": 500, "temperature": 0}
    status, out, err = chat(long, long, "/drop", "hi", options=flags(**full))
    assert (status, out) == (1, printed(answers(model, text, **full)[0][0] for text in (long, "hi")))
    assert err.count("[the context of 256 tokens is full: /drop forgets the oldest turn, /clear all turns]") == 2
    assert "holds 256: /drop forgets the oldest turn, /clear all turns" in err


def test_lines_that_begin_with_a_path_or_a_space_are_messages(chat, model):
    _, out, _ = chat("/usr/bin is what?", " /clear", "one\\", "two")
    assert out == printed(answers(model, "/usr/bin is what?", "/clear", "one\ntwo")[0])


def test_bytes_that_are_no_text_are_replaced(chat, model):
    assert chat("caf\udce9")[:2] == (0, printed(answers(model, "caf\ufffd")[0]))


def test_help_lists_every_command(chat):
    _, _, err = chat("/help")
    for command in ("bye", "clear", "drop", "exit", "help", "load", "model", "models", "quit", "regenerate", "save"):
        assert f"/{command}" in err
    for command in ("set", "stats", "system", "temperature"):
        assert f"\n/{command} [" in err or f"\n/{command}:" in err


@pytest.mark.parametrize("word", ["/exit", "/bye", "/quit"])
def test_words_that_end_the_chat(chat, word):
    assert chat(word, "hi")[:2] == (0, "")


def test_a_model_without_a_chat_template_reads_a_transcript(chat, save):
    folder = save(random_model("llama"), byte_tokenizer())
    lm = specbeam.load(folder)
    _, out, err = chat("hi", "more", model=folder, options=[*SHORT, "--system", "A talk."])
    assert "has no chat template: it reads a transcript" in err
    stops = {"max_new_tokens": 9, "stop_strings": ["\nUser:", "\nAssistant:"]}
    text = "A talk.\n\nUser: hi\n\nAssistant:"
    first = specbeam.generate(lm, text, raw=True, **stops).text.strip()
    second = specbeam.generate(lm, f"{text} {first}\n\nUser: more\n\nAssistant:", raw=True, **stops).text.strip()
    assert [line.rstrip() for line in out.splitlines()] == printed([first, second]).splitlines()


def test_a_model_with_an_encoder_is_refused(chat, save):
    status, _, err = chat("hi", model=save(make("t5"), byte_tokenizer()))
    assert status == 2
    assert "has an encoder: it reads one text and no conversation. Use specbeam generate" in err


def test_the_chat_goes_on_after_a_failed_pass(chat, model, before_passes):
    expected = answers(model, "hi")[0]

    def fail(number, _):
        if number == 3:
            raise RuntimeError("broken")

    before_passes(fail)
    status, out, err = chat("oh", "hi")
    assert status == 1
    assert "specbeam: RuntimeError: broken" in err
    assert out.endswith(printed(expected))


def test_ctrl_c_keeps_the_part_and_the_conversation_goes_on(chat, save, terminal, tmp_path):
    folder = save(random_model("llama", max_position_embeddings=2000), byte_tokenizer(CHAT_TEMPLATE))
    lm, file = specbeam.load(folder), tmp_path / "talk.json"
    long = {"max_new_tokens": 60, "eos_token_id": EOS + 1, "temperature": 0}
    (whole,), _ = answers(lm, "hi", **long)
    shown, before = terminal(interrupt_at=whole[:10]), signal.getsignal(signal.SIGINT)
    status, _, err = chat("hi", "more", "/stats", f"/save {file}", options=flags(**long), model=folder)
    assert status == 0
    assert signal.getsignal(signal.SIGINT) is before
    saved = json.loads(file.read_text(encoding="utf-8"))
    hi, part, more, last = (message["content"] for message in saved)
    assert (hi, more) == ("hi", "more")
    assert whole.startswith(part)
    assert len(part) < len(whole)
    assert shown.text() == printed([part, last])
    assert last == specbeam.generate(lm, saved[:-1], **long).text
    assert err.count("[stopped]\n") == 1
    assert "  0 of" not in err  # the part was cached


def test_ctrl_c_before_the_answer_forgets_the_message(chat, model, before_passes):
    (expected,), _ = answers(model, "hi", num_beams=4)
    before_passes(press_ctrl_c_in(1))
    _, out, err = chat("x" * 100, "hi", options=[*SHORT, "--num-beams", "4"])
    assert out == f"\n{expected}\n"
    assert "[stopped before there was a text: the message is forgotten]" in err


@pytest.mark.parametrize("again", ["/regenerate", "/load FILE"])
def test_ctrl_c_before_another_answer_keeps_the_conversation(chat, model, before_passes, tmp_path, again):
    """The third pass is the first one of the second answer."""
    file, saved = tmp_path / "talk.json", tmp_path / "saved.json"
    (expected,), messages = answers(model, "hi", max_new_tokens=2, num_beams=4)
    messages = messages if again == "/regenerate" else messages[:1]
    file.write_text(json.dumps(messages))
    before_passes(press_ctrl_c_in(3))
    said = ["hi", again.replace("FILE", str(file)), f"/save {saved}", "/regenerate"]
    _, out, err = chat(*said, options=("--max-new-tokens", "2", "--num-beams", "4"))
    assert "[stopped before there was a text: the conversation stays as it was]" in err
    assert json.loads(saved.read_text()) == messages
    assert err.count("the same answer") == (again == "/regenerate")  # of the second time alone
    assert out == f"{expected}\n\n{expected}\n"


@pytest.mark.parametrize(
    ("typed", "lines"),
    [
        ("hi é\r", ["hi é"]),
        ("one\\\rtwo\x1b\rthree\r", ["one\ntwo\nthree"]),
        ("a typo\x03better\r", ["better"]),
        ("/rege\t\r", ["/regenerate"]),
        ("hi\r\x03\x03", ["hi", EOFError]),
        ("\x03hi\r", ["hi"]),
        ("\x03a typo\x03\x03better\r", ["better"]),
        ("\x03a\r\x03b\r", ["a", "b"]),
        ("\x04", [EOFError]),
    ],
)
def test_lines_are_edited_as_in_other_terminals(typed, lines):
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text(typed)
        read = line_reader(["/regenerate", "/help"])
        for line in lines:
            if line is EOFError:
                with pytest.raises(EOFError):
                    read()
            else:
                assert read() == line


def test_without_prompt_toolkit_lines_are_read_plainly(monkeypatch):
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\none\\\ntwo\n"))
    read = line_reader([])
    assert [read(), read()] == ["hi", "one\ntwo"]
    with pytest.raises(EOFError):
        read()


def test_answers_are_drawn_as_the_first_line_says(chat, model, folder):
    _, out, err = chat("hi", options=DRAWN, whole=True)
    assert out == printed(answers(model, "hi", **FALLBACK.settings, seed=5)[0])
    how = "temperature 0.7, top_p 0.9, repetition_penalty 1.1, as specbeam does by default"
    rounded = "It runs on the cpu with weights rounded to 8 bits (--dtype float32 does not round them)."
    assert err.splitlines()[:2] == [f"{folder} samples with {how}", rounded]
    assert "int8" not in err  # once, in these words


@pytest.mark.parametrize(
    ("given", "used", "says"),
    [
        ({"temperature": 0}, {}, "takes the likeliest token (greedy), as you say"),
        ({"num_beams": 3}, {"num_beams": 3}, "searches with 3 beams, as you say"),
        (
            {"top_p": 0.5, "seed": 5},
            FALLBACK.settings | {"top_p": 0.5, "seed": 5},
            "temperature 0.7, repetition_penalty 1.1, top_p 0.5, as you say, and else as specbeam does",
        ),
    ],
)
def test_flags_win_field_by_field(chat, model, given, used, says):
    _, out, err = chat("hi", options=["--max-new-tokens", "9", *flags(**given)], whole=True)
    assert out == printed(answers(model, "hi", **used)[0])
    assert says in err.splitlines()[0]


@pytest.mark.parametrize(
    ("settings", "used", "says"),
    [
        (
            {"do_sample": True, "temperature": 0.5, "top_k": 9},
            {"temperature": 0.5, "top_k": 9},
            "temperature 0.5, top_k 9",
        ),
        ({"do_sample": False}, None, "takes the likeliest token (greedy)"),
    ],
)
def test_the_checkpoint_says_how_to_sample(chat, save, settings, used, says):
    folder = save(random_model("llama"), byte_tokenizer(CHAT_TEMPLATE))
    rewrite(folder, "generation_config.json", **settings)
    seed = {"seed": 5} if used else {}
    _, out, err = chat("hi", options=["--max-new-tokens", "9", *flags(**seed)], model=folder, whole=True)
    assert out == printed(answers(specbeam.load(folder), "hi", **used or {}, **seed)[0])
    assert f"{says}, as the model's generation_config.json says\n" in err


def test_options_are_changed_without_a_restart(chat, model):
    said = [
        "hi",
        "/set seed 5",
        "/temperature 0.9",
        "/set seed 5",
        "hi",
        "/set --top-p",
        "/temperature default",
        "/set seed",
    ]
    status, out, err = chat("/set max_new_tokens 9", *said, "/set", options=("--temperature", "0"))
    (first,), messages = answers(model, "hi")
    second = answer(model, messages, "hi", **FALLBACK.settings | {"temperature": 0.9, "seed": 5})
    assert (status, out) == (1, printed([first, second]))  # a seed has no effect on greedy answers
    notes = err.splitlines()
    assert notes[0] == "max_new_tokens 9"
    assert "temperature 0.9" in notes
    assert "top_p 0.9, as specbeam does by default" in notes
    assert "temperature 0.7, as specbeam does by default" in notes
    assert notes.count("seed 5") == 3
    assert "not set: min_new_tokens, do_sample, top_k" in err
    assert "repetition_penalty 1" not in chat("/set")[2]  # it has no part in greedy answers


@pytest.mark.parametrize(
    ("line", "option"), [("/set stop_strings e", ["e"]), ('/set stop_strings ["e", "5"]', ["e", "5"])]
)
def test_texts_and_lists_are_options_too(chat, model, line, option):
    assert chat(line, "hi")[1] == printed(answers(model, "hi", stop_strings=option)[0])


def test_another_model_goes_on_with_the_conversation(chat, model, save):
    other = save(random_model("llama", seed=1), byte_tokenizer(CHAT_TEMPLATE))
    encoder = save(make("t5"), byte_tokenizer())
    status, out, err = chat("hi", f"/model {encoder}", f"/model {other}", "more", "/model", "/bye")
    (first,), messages = answers(model, "hi")
    assert (status, out) == (1, printed([first, answer(specbeam.load(other), messages, "more")]))
    assert "has an encoder" in err
    assert err.count(f"{other} takes the likeliest token") == 2  # once it is loaded, and when it is asked for


def test_a_model_that_is_stopped_while_it_loads_changes_nothing(chat, model, monkeypatch):
    from specbeam.cli import chat as command

    load, loads = command.load_model, []

    def load_once(*given, **how):
        loads.append(given)
        if len(loads) > 1:
            raise KeyboardInterrupt
        return load(*given, **how)

    monkeypatch.setattr(command, "load_model", load_once)
    _, out, err = chat("hi", "/model smollm2-135m-instruct", "more")
    assert out == printed(answers(model, "hi", "more")[0])
    assert f"[stopped: {model.source} stays]" in err


def test_models_are_listed(chat):
    assert "smollm2-135m-instruct" in chat("/models")[2]


def test_an_answer_that_repeats_itself_says_so(chat):
    loop = ("--max-new-tokens", "100", "--temperature", "0", "--logit-bias", "65=1000")
    _, out, err = chat("hi", options=loop)
    repeated, advice = out.strip()[:1], "/set repetition_penalty 1.2 makes that less likely"
    assert err.startswith(f'[the answer repeats itself: "{repeated}". {advice}')
    assert "longer" not in err


def test_an_interrupt_in_the_middle_of_a_pass_keeps_the_conversation(model, monkeypatch, capsys):
    from specbeam.cli import chat as command

    lines = iter(["hi", "more", "more", "/bye"])
    (expected,), messages = answers(model, "hi")
    hear, heard = command.Chat.hear, []

    def hear_or_stop(self, line):
        heard.append(line)
        if len(heard) == 2:
            raise KeyboardInterrupt
        hear(self, line)

    monkeypatch.setattr(command.Chat, "hear", hear_or_stop)
    monkeypatch.setattr(command, "line_reader", lambda _: lambda: next(lines))
    for stream in "stdin", "stdout":
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    assert main(["chat", "--model", model.source, *SHORT]) == 0
    out, err = capsys.readouterr()
    assert out == printed([expected, answer(model, messages, "more")])
    assert "[stopped: the conversation stays as it was]" in err
    assert f"[loading {model.source}]" in err


def test_thoughts_are_notes(chat, save, specbeam_command, tmp_path):
    """The answer is what generate makes, without thoughts, and the next turn has them apart."""
    template = "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    template += "{{ m.content }}{% endfor %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}"
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(["<think>", "</think>"])
    folder = save(random_model("llama", vocab_size=261), tokenizer)
    begin, letter = tokenizer.convert_tokens_to_ids(["<think>", "w"])
    only = ("--max-new-tokens", "9", "--temperature", "0")
    thinks = (*only, "--logit-bias", f"{begin}=500")
    status, out, err = chat("hi", f"/save {tmp_path}/said.json", options=thinks, model=folder)
    assert (status, out) == (0, "\n")
    _, said = json.loads((tmp_path / "said.json").read_text())
    assert said == {"role": "assistant", "content": "", "reasoning_content": "<think>" * 8}
    assert "<think>" * 8 in err
    status, out, err = chat("hi", options=(*only, "--no-think", "--logit-bias", f"{letter}=500"), model=folder)
    assert (status, out) == (0, "wwwwwwwww\n")
    ends = (*only, "--logit-bias", f"{letter}=500")
    status, out, err = specbeam_command("generate", "hi", "--model", str(folder), "--no-think", "--show-prompt", *ends)
    assert (status, out) == (0, "<user>hi<assistant><think></think>\nwwwwwwwww\n")
    _, _, err = chat("hi", options=(*only, "--think"))
    assert "--think has no effect: the chat template of " in err
    _, _, err = chat("hi", options=(*only, "--no-think", "--raw"))
    assert "--no-think has no effect: no chat template is used" in err
