"""Prompts of every kind, and what the model sees of them."""

import numpy as np
import pytest
import torch

import specbeam
from specbeam.errors import SpecbeamError
from specbeam.models.prompts import encode, render
from tests.conftest import BOS, byte_tokenizer, of_transformers

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def chat(tiny):
    return tiny("llama", chat=True)[1]


def test_text_is_a_users_message_where_there_is_a_template_as_transformers_renders_it(chat):
    assert specbeam.show_prompt(chat, "Hi") == "<bos>user: Hi\nassistant: "
    assert specbeam.show_prompt(chat, "Hi", system="Be brief.") == specbeam.show_prompt(chat, MESSAGES)
    assert specbeam.show_prompt(chat, MESSAGES) == "<bos>system: Be brief.\n<bos>user: Hi\nassistant: "
    assert encode(chat, "Hi")[0] == BOS
    expected = of_transformers(chat.tokenizer).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert encode(chat, MESSAGES) == list(expected)


BEGUN = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, "}]


def test_a_message_of_the_assistant_at_the_end_is_continued(chat, lm):
    theirs = of_transformers(chat.tokenizer).apply_chat_template(BEGUN, continue_final_message=True, return_dict=False)
    assert encode(chat, BEGUN) == list(theirs)
    assert specbeam.show_prompt(chat, BEGUN) == "<bos>user: Count.\n<bos>assistant: One, "
    assert specbeam.show_prompt(chat, BEGUN, system="Be brief.").endswith("<bos>assistant: One, ")
    assert specbeam.show_prompt(lm, BEGUN) == specbeam.show_prompt(chat, BEGUN, raw=True) == "Count.\n\nOne, "
    closed = specbeam.show_prompt(chat, [*BEGUN, {"role": "user", "content": "On."}])
    assert closed == "<bos>user: Count.\n<bos>assistant: One, \n<bos>user: On.\nassistant: "


def templated(content):
    """A tokenizer whose chat template writes the content of a message so."""
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
    begun = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return byte_tokenizer(turns.replace("CONTENT", content) + begun)


def begun(content):
    return [{"role": "user", "content": " q "}, {"role": "assistant", "content": content}]


@pytest.mark.parametrize("content", ["m.content", "m.content | trim", "m.content[0].text", "m.content[0].text | trim"])
@pytest.mark.parametrize("answer", ["", "1", "1. Blue\n2. ", "1. Blue\n\n", "a\u00a0", "im", "user"])
def test_a_begun_answer_is_continued_where_it_ends(content, answer):
    """Also if the template trims messages, and if the answer's text is elsewhere in the prompt."""
    question = f"<|im_start|>user\n{'q' if 'trim' in content else ' q '}<|im_end|>\n<|im_start|>assistant\n"
    assert render(templated(content), begun(answer)) == question + answer


def test_space_before_a_begun_answer_is_left_to_the_template():
    for answer, trimmed in (("  ", ""), ("\n1. ", "1. ")):
        start = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        assert render(templated("m.content | trim"), begun(answer)) == start + trimmed
        theirs = templated("m.content").apply_chat_template(begun(answer), tokenize=False, continue_final_message=True)
        assert render(templated("m.content"), begun(answer)) == theirs == start.replace("q", " q ") + answer


@pytest.mark.parametrize(
    "content", ["m.content | upper", "m.content[0].text | upper", "m.content.split('</think>')[-1]"]
)
def test_a_begun_answer_that_the_template_changes_is_refused(content):
    with pytest.raises(SpecbeamError, match="changes the assistant's message at the end"):
        render(templated(content), begun("one</think>two"))


def test_parts_of_text_are_joined_by_line_breaks(chat):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role, end in (("user", "\nassistant: "), ("assistant", "")):
        assert specbeam.show_prompt(chat, [{"role": role, "content": parts}]) == f"<bos>{role}: a\nb{end}"
    assert len(parts) == 2  # the caller's messages are not changed


def test_plain_text_without_a_template_or_when_raw(chat, lm):
    assert specbeam.show_prompt(lm, "Hi") == "Hi"
    assert specbeam.show_prompt(chat, "Hi", raw=True) == "Hi"
    assert specbeam.show_prompt(lm, MESSAGES) == "Be brief.\n\nHi"
    assert specbeam.show_prompt(lm, "Hi", system="Be brief.") == "Be brief.\n\nHi"


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda ids: [*np.array(ids)]])
def test_token_ids_are_taken_as_they_are(chat, kind):
    assert encode(chat, kind([1, 2, 3])) == [1, 2, 3]


def test_arrays_make_a_batch(lm):
    results = specbeam.generate(lm, [np.array([1, 2]), torch.tensor([3])], max_new_tokens=2)
    assert [r.stats.prompt_tokens for r in results] == [2, 1]


class PolarsSeries:
    """What a column of polars has: it is not installed."""

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)

    def __len__(self):
        return len(self.values)

    def to_list(self):
        return [*self.values]


def column_of_datasets(texts):
    return pytest.importorskip("datasets").Dataset.from_dict({"text": texts})["text"]


def pandas_series(texts):
    return pytest.importorskip("pandas").Series(texts, index=range(5, 5 + len(texts)))


def chunked_array(texts):
    return pytest.importorskip("pyarrow").chunked_array([texts])


COLUMNS = {
    "tuple": tuple,
    "generator": lambda texts: (text for text in texts),
    "numpy": np.array,
    "objects of numpy": lambda texts: np.array(texts, dtype=object),
    "pandas": pandas_series,
    "polars": PolarsSeries,
    "datasets": column_of_datasets,
    "pyarrow": chunked_array,
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_a_column_of_texts_is_a_list_of_prompts(lm, column):
    texts, labels = ["one", "two"], ["good", "bad"]
    results = specbeam.generate(lm, column(texts), max_new_tokens=3)
    assert [r.token_ids for r in results] == [r.token_ids for r in specbeam.generate(lm, texts, max_new_tokens=3)]
    found = specbeam.labels.probabilities(lm, column(texts), column(labels))
    assert found == specbeam.labels.probabilities(lm, texts, labels)
    assert specbeam.suffix_automaton(lm, column(texts)).next == specbeam.suffix_automaton(lm, texts).next
    for takes_one in (specbeam.stream, specbeam.nbest):
        with pytest.raises(SpecbeamError, match="takes one prompt"):
            takes_one(lm, column(texts))


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_a_column_of_token_ids_is_a_prompt_and_a_text_to_score(lm, column):
    expected = specbeam.generate(lm, [5, 6, 7], max_new_tokens=3).token_ids
    assert specbeam.generate(lm, column([5, 6, 7]), max_new_tokens=3).token_ids == expected
    assert [piece.result for piece in specbeam.stream(lm, column([5, 6, 7]), max_new_tokens=1)][-1].token_ids
    ((_, score, _),) = specbeam.scoring.score(lm, [(column([5, 6]), column([7, 8]))])
    assert score == next(specbeam.scoring.score(lm, [([5, 6], [7, 8])]))[1]
    results = specbeam.generate(lm, [column([5, 6, 7]), column([8])], max_new_tokens=3)
    assert [r.stats.prompt_tokens for r in results] == [3, 1]


def test_rows_of_token_ids_are_prompts(lm):
    for rows in (np.array([[5, 6], [7, 8]]), torch.tensor([[5, 6], [7, 8]])):
        assert [r.stats.prompt_tokens for r in specbeam.generate(lm, rows, max_new_tokens=1)] == [2, 2]


def test_a_whole_table_is_refused_and_a_missing_text_named(lm):
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    for table in (pandas.DataFrame({"text": ["a"]}), pyarrow.table({"text": ["a"]})):
        for takes in (specbeam.generate, lambda lm, table: specbeam.labels.probabilities(lm, table, ["a", "b"])):
            with pytest.raises(SpecbeamError, match=r"is a table: give one of its columns, such as table\['text'\]"):
                takes(lm, table)
    with pytest.raises(SpecbeamError, match=r"prompt 1: a prompt is text, .*not (float|NoneType)"):
        specbeam.generate(lm, pandas.Series(["a", None, "c"]))


@pytest.mark.parametrize(
    ("prompt", "keywords", "says"),
    [
        ([{"role": "wizard", "content": "x"}], {}, "refuses these messages: unknown role wizard"),
        ([{"role": "user", "content": 3}], {}, '"role" and "content"'),
        ([1, 2], {"system": "x"}, "taken as it is"),
        ([1, -1], {}, "-1 is not in the model's vocabulary"),
        (None, {}, "not NoneType"),
        (b"Hi", {}, "not bytes"),
        ("a\ud800b", {}, "half a surrogate pair"),
        ("Hi", {"system": 5}, '"role" and "content"'),
        (MESSAGES, {"system": "Be long."}, "system= gives another one: leave one out"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "specbeam reads text only"),
        ([{"role": "user", "content": [{"text": "no type"}]}], {}, '"role" and "content"'),
        ([{"role": "user", "content": ["Hi"]}], {}, '"role" and "content"'),
        ([{"content": []}], {}, '"role" and "content"'),
        ([{"role": "assistant", "content": ""}], {}, "the messages are empty: give at least one with text"),
    ],
)
def test_what_is_no_prompt_is_refused(chat, prompt, keywords, says):
    with pytest.raises(SpecbeamError, match=says):
        encode(chat, prompt, **keywords)
