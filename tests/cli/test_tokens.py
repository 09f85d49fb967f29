"""``specbeam tokens``: it agrees with transformers' tokenizers, and no byte of the text is lost."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, ByT5Tokenizer

import specbeam
from specbeam.checkpoints.formats.folder import FolderCheckpoint
from specbeam.cli import main
from specbeam.cli.tokens import tokens_of
from specbeam.models.prompts import encode
from specbeam.text.tokenizer import BYTES
from tests.checkpoints.test_gguf import tokenizer_of_file, write_gguf
from tests.conftest import byte_tokenizer, fast_tokenizer, random_model

TEXT = "Hi  wörld, 日本\n\t🙂<bos>!"


def word_tokenizer():
    """Words, <unk> for others, and <s> before each text."""
    vocabulary = {word: i for i, word in enumerate(("<unk>", "<s>", "hello", "world"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return fast_tokenizer(tokenizer, unk_token="<unk>", bos_token="<s>")


@pytest.fixture(scope="module")
def wordwise(save):
    return str(save(random_model("llama"), word_tokenizer()))


@pytest.fixture
def tokens(capsys):
    """The command's list, as --json prints it."""

    def tokens(*arguments):
        assert main(["tokens", *arguments, "--json"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        return json.loads(line)

    return tokens


@pytest.mark.parametrize("kind", ["folder", "wordwise"])
@pytest.mark.parametrize("text", [TEXT, "hello there  world", " hello <unk> world "])
@pytest.mark.parametrize("special", [True, False])
def test_it_agrees_with_transformers(tokens, request, kind, text, special):
    model = request.getfixturevalue(kind)
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    ids = expected.input_ids
    got = tokens(text, "--model", model, *([] if special else ["--no-special"]))
    assert [(token["position"], token["id"]) for token in got] == [*enumerate(ids)]
    assert [token["piece"] for token in got] == tokenizer.convert_ids_to_tokens(ids)
    assert [tuple(token["offsets"]) for token in got] == expected["offset_mapping"]
    assert [token["special"] for token in got] == [i in tokenizer.all_special_ids for i in ids]


def test_unknown_words_and_special_tokens_are_marked(tokens, wordwise):
    got = tokens("hello there <unk> <s>", "--model", wordwise)
    assert [(t["piece"], t["text"], t["offsets"], t["special"], t["unknown"]) for t in got] == [
        ("<s>", "<s>", [0, 0], True, False),
        ("hello", "hello", [0, 5], False, False),
        ("<unk>", "<unk>", [6, 11], True, True),
        ("<unk>", "<unk>", [12, 17], True, False),  # the text says so itself
        ("<s>", "<s>", [18, 21], True, False),
    ]


def test_the_end_of_text_is_no_unknown_word_where_both_are_one_token():
    tokenizer = word_tokenizer()
    tokenizer.unk_token = "<s>"
    assert not any(token["unknown"] for token in tokens_of(tokenizer, "hello <s>", True))


BYTE_TOKENIZER = byte_tokenizer()


@given(st.text())
def test_no_byte_is_lost(text):
    parts = [token["text"] for token in tokens_of(BYTE_TOKENIZER, text, True)]
    assert b"".join(part if isinstance(part, bytes) else part.encode() for part in parts) == text.encode()


def test_byte_level_vocabularies_write_bytes_as_tokenizers_does():
    assert {*BYTES} == {*pre_tokenizers.ByteLevel.alphabet()}
    assert sorted(BYTES.values()) == [*range(256)]


def test_leading_spaces_and_bytes_of_sentencepiece_are_shown():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi"]
    metadata = {"scores": [-float(i) for i in range(len(pieces))], "token_type": [2, 3, 3, *[6] * 256, *[1] * 5]}
    tokenizer = tokenizer_of_file("llama", pieces, bos_token_id=1, unknown_token_id=0, **metadata)
    got = [(token["piece"], token["text"]) for token in tokens_of(tokenizer, "hi hié", True)]
    assert got == [("<s>", "<s>"), ("▁hi", " hi"), ("▁hi", " hi"), ("<0xC3>", b"\xc3"), ("<0xA9>", b"\xa9")]


def test_added_tokens_are_written_as_they_are():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens("<begin▁of text>")
    assert [token["text"] for token in tokens_of(tokenizer, "<begin▁of text>▁", True)] == [
        "<begin▁of text>",
        *(b"\xe2", b"\x96", b"\x81"),
    ]


def test_a_gguf_file(tokens, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", random_model("llama"))
    expected = specbeam.load(path).tokenizer("tab é", return_offsets_mapping=True)
    got = tokens("tab é", "--model", str(path))
    assert [token["id"] for token in got] == expected.input_ids
    assert [tuple(token["offsets"]) for token in got] == expected["offset_mapping"]
    assert [token["text"] for token in got] == ["t", "ab", " ", "\\xc3", "\\xa9"]


def test_a_chat_is_what_generate_gives_the_model(tokens, folder):
    got = tokens("hi", "--chat", "--system", "Be brief.", "--model", folder)
    assert [token["id"] for token in got] == encode(specbeam.load(folder), "hi", system="Be brief.")
    assert (got[0]["piece"], got[0]["special"]) == ("<bos>", True)


def test_without_a_chat_template_there_is_no_chat_to_show(specbeam_command, wordwise):
    status, _, err = specbeam_command("tokens", "hi", "--chat", "--model", wordwise)
    assert (status, "has no chat template: leave out --chat" in err) == (2, True)


def test_weights_are_not_read_so_any_architecture_works(tokens, save, monkeypatch):
    monkeypatch.setattr(FolderCheckpoint, "read", None)
    assert len(tokens("hello", "--model", str(save(random_model("gpt_neox"))))) == 5


def test_a_slow_tokenizer_has_no_offsets_and_says_so(capsys, save):
    folder = str(save(random_model("llama", vocab_size=400), ByT5Tokenizer()))
    assert main(["tokens", "hi", "--model", folder, "--json"]) == 0
    out, err = capsys.readouterr()
    got = json.loads(out)
    assert [token["id"] for token in got] == ByT5Tokenizer()("hi").input_ids
    assert {token["offsets"] for token in got} == {None}
    assert "ByT5Tokenizer is a slow tokenizer: it has no offsets" in err
    assert main(["tokens", "hi", "--model", folder]) == 0
    assert "  -  " in capsys.readouterr().out


def test_the_table_has_one_line_per_token(capsys, monkeypatch, wordwise):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\nyou\n")))
    assert main(["tokens", "-", "--model", wordwise]) == 0
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()] == [
        ["position", "id", "offsets", "piece", "text"],
        ["0", "1", "[0,", "0)", "special", "<s>", "'<s>'"],
        ["1", "2", "[0,", "5)", "hello", "'hello'"],
        ["2", "0", "[6,", "9)", "unknown", "<unk>", "'<unk>'"],
    ]
    assert err == "[3 tokens, 9 characters]\n"


def test_control_characters_do_not_reach_the_terminal(capsys, folder):
    assert main(["tokens", "a\x1b\n é", "--model", folder]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 7
    assert all(shown in out for shown in (r"'\x1b'", r"'\n'", "' '", r"b'\xc3'", r"b'\xa9'"))
    assert "\x1b" not in out


def test_a_token_that_the_vocabulary_lacks_is_one_line(tmp_path, save, specbeam_command):
    folder = save(random_model("llama"), word_tokenizer())
    file = folder / "tokenizer.json"
    written = json.loads(file.read_text())
    written["post_processor"]["special_tokens"]["<s>"]["ids"] = [258]
    file.write_text(json.dumps(written))
    status, out, err = specbeam_command("tokens", "hello", "--model", str(folder))
    assert (status, out) == (2, "")
    assert "the token id 258, which its own vocabulary lacks" in err.splitlines()[-1]  # transformers may warn before
