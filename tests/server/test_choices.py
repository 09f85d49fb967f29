"""Answers that must be one of some texts: ``structured_outputs`` with ``choice``, vLLM's field."""

import pytest

import specbeam
from specbeam.models.sampling_defaults import FALLBACK
from tests.server.test_rounds import watched

CHOICES = ["abc", "abd", "ba", "bab", "zz"]
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0},
        {"temperature": 0, "draft": "ngram"},
        {"seed": 4, "temperature": 0.9, "n": 3},
        {"num_beams": 4, "n": 3},
        {"num_beams": 4, "n": 3, "draft": "small", "num_draft_tokens": 2},
    ],
)
def test_the_texts_are_those_of_the_library_under_the_same_constraint(served, chat_lm, draft_lm, how):
    options = {"n": 1, **FALLBACK.fill(how), "constraint": specbeam.TokenTrie(CHOICES, chat_lm), "max_new_tokens": 8}
    options["num_return_sequences"] = options.pop("n")
    if options.get("draft") == "small":
        options["draft"] = draft_lm
    fields = {"max_tokens": 8, "structured_outputs": {"choice": CHOICES}, **how}
    for path, prompt in {"/v1/completions": {"prompt": "ab ab"}, "/v1/chat/completions": {"messages": CHAT}}.items():
        choices = served.choices(path, **prompt, **fields)
        texts = [choice.get("text") or choice["message"]["content"] for choice in choices]
        here = specbeam.generate(chat_lm, *prompt.values(), raw="prompt" in prompt, **options)
        if "seed" in how:  # the server draws each sample by a request of its own
            assert len(texts) == 3
            assert texts[0] == here.text
        else:
            assert texts == [one.text for one in here.sequences]
        assert {*texts} <= {*CHOICES}
        if "num_beams" in how:
            assert [choice["score"] for choice in choices] == [one.score for one in here.sequences]


def test_events_say_which_of_the_likeliest_tokens_are_masked(served, chat_lm):
    fields = {"prompt": "ab ab", "max_tokens": 8, "num_beams": 3, "logprobs": 10}
    _, *free, _ = watched(served, "/rounds/completions", **fields)
    assert not any("masked" in token for one in free for row in one["likeliest"] for token in row["tokens"])
    texts = [token["text"] for token in free[0]["likeliest"][0]["tokens"]]
    likely = next(text for text in texts if len(text) == 1 and text.isascii())
    choices = [*CHOICES, likely, likely + "z"]
    allowed = [[*chat_lm.tokenizer(text, add_special_tokens=False).input_ids] for text in choices]
    first, *rounds, _ = watched(served, "/rounds/completions", structured_outputs={"choice": choices}, **fields)
    path = {len(first["prompt"]) - 1: []}
    seen = set()
    for one in rounds:
        for row in one["likeliest"]:
            before = path[row["after"]]
            follow = {text[len(before)] for text in allowed if text[: len(before)] == before and text != before}
            ends = chat_lm.eos_token_ids if before in allowed else set()
            for token in row["tokens"]:
                assert token["masked"] == (token["token_id"] not in follow | ends)
                seen.add(token["masked"])
        for beam in [*(beam for step in one["steps"] for beam in step), *one["ended"]]:
            path[beam["node"]] = [*path[beam["after"]], beam["token_id"]]
    assert seen == {True, False}


def test_answers_of_several_prompts_have_their_numbers(served):
    """Cut after one token, "abc" and "abd" are one text."""
    fields = {"prompt": ["x", "y"], "structured_outputs": {"choice": ["abc", "abd"]}, "num_beams": 2, "n": 2}
    choices = served.choices(**fields, max_tokens=1)
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "a"), (2, "a")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "structured_outputs needs one of choice, json, json_object, regex and grammar: give "),
        ({"choice": ["a"], "regex": "a+"}, "structured_outputs needs one of choice, "),
        ({"json_object": False}, "structured_outputs needs one of choice, "),
        ({"json": {"not": {}}}, "the JSON schema cannot be enforced: Unimplemented keys"),
        ({"regex": "(?=a)"}, "the regular expression cannot be enforced: "),
        ({"grammar": "{"}, "the grammar cannot be enforced: it begins with {"),
        ({"whitespace_pattern": "a"}, "structured_outputs.whitespace_pattern is not supported: remove it"),
        ({"choice": []}, "structured_outputs.choice: List should have at least 1 item"),
        ({"choice": ["a", ""]}, "structured_outputs.choice[1]: String should have at least 1 character"),
        ({"choice": "a"}, "structured_outputs.choice: Input should be a valid list"),
        (["a"], "structured_outputs: Input should be"),
    ],
)
def test_other_forms_are_refused(served, given, message):
    for path, prompt in {"/v1/completions": {"prompt": "a"}, "/rounds/chat": {"messages": CHAT}}.items():
        error = served.refused(path, structured_outputs=given, **prompt)
        assert error["param"] == "structured_outputs"
        assert error["message"].startswith(message)
