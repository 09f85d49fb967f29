"""Probabilities of labels, against transformers evaluating each label alone."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import specbeam
from specbeam import SpecbeamError
from specbeam.api.labels import CONTENT_FREE, collapse, probabilities
from specbeam.models.prompts import encode_answers, space_before
from tests.conftest import CHAT_TEMPLATE, byte_tokenizer, head_of, random_model, reference_model


@pytest.fixture(scope="module")
def saved(save):
    return save(random_model("llama"), byte_tokenizer(CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def lm(saved):
    return specbeam.load(saved, dtype="float32")


@pytest.fixture(scope="module")
def theirs(saved):
    return AutoModelForCausalLM.from_pretrained(saved).eval()


def log_prob(theirs, lm, before, text):
    """The log-probability of a text after another one, by transformers. A token is a byte here."""
    context, ids = (lm.tokenizer(part, add_special_tokens=False).input_ids for part in (before, text))
    with torch.no_grad():
        log_probs = theirs(torch.tensor([context + ids])).logits[0].double().log_softmax(-1)
    return sum(float(log_probs[len(context) - 1 + place, token]) for place, token in enumerate(ids))


def expected(theirs, lm, before, joint, labels):
    """Of each label the probability that the longest label that the text begins with is this one, of all labels."""
    of_text = {label: math.exp(log_prob(theirs, lm, before, joint + label)) for label in labels}
    own = {}
    for label, share in of_text.items():
        longer = [other for other in labels if other != label and other.startswith(label)]
        nearest = [one for one in longer if not any(o != one and one.startswith(o) for o in longer)]
        own[label] = share - sum(of_text[one] for one in nearest)
    return {label: share / sum(own.values()) for label, share in own.items()}


labels_of_any_kind = st.lists(st.text("ab c", min_size=1, max_size=4), min_size=2, max_size=6, unique=True).filter(
    lambda labels: all(map(str.strip, labels))
)


@given(prompts=st.lists(st.text("xy: \n", min_size=1, max_size=9), min_size=1, max_size=3), labels=labels_of_any_kind)
def test_probabilities_are_those_of_transformers(lm, theirs, prompts, labels):
    if len({label if label[0].isspace() else f" {label}" for label in labels}) < len(labels):
        return  # after a prompt without a space, " a" and "a" are one text
    for found, prompt in zip(probabilities(lm, prompts, labels, raw=True), prompts, strict=True):
        joined = {label: space_before(prompt, label) + label for label in labels}
        wanted = expected(theirs, lm, prompt, "", [*joined.values()])
        assert list(found) == labels
        assert sum(found.values()) == pytest.approx(1)
        for label in labels:
            assert found[label] == pytest.approx(wanted[joined[label]], rel=1e-4, abs=1e-9)


def test_after_a_chat_template_a_label_begins_the_answer(lm, theirs):
    labels = ["good", "good enough", "bad"]
    rendered = "<bos>system: Judge.\n<bos>user: hi\nassistant: "
    (found,) = probabilities(lm, ["hi"], labels, system="Judge.")
    assert found == pytest.approx(expected(theirs, lm, rendered, "", labels), rel=1e-4)
    (begun,) = probabilities(
        lm, [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}]], labels
    )
    after = "<bos>user: hi\n<bos>assistant: It is"
    assert begun == pytest.approx(expected(theirs, lm, after, " ", labels), rel=1e-4)


def test_many_labels_are_evaluated(lm, theirs):
    labels = [f"{number:03}" for number in range(120)]
    (found,) = probabilities(lm, ["No."], labels, raw=True)
    assert found == pytest.approx(expected(theirs, lm, "No.", " ", labels), rel=1e-3)


@pytest.mark.parametrize(
    ("prompt", "answer", "space"),
    [
        ("Sentiment:", "a", " "),
        ("Sentiment: ", "a", ""),
        ("Sentiment:\n", "a", ""),
        ("Answer: (", "A", ""),
        ('Answer: "', "A", ""),
        ("Answer: «", "A", ""),
        ("感情：", "正", ""),
        ("감정", "긍정", " "),
        ("Sentiment:", "\ta", ""),
    ],
)
def test_the_space_before_a_label(prompt, answer, space):
    assert space_before(prompt, answer) == space


@pytest.mark.parametrize(
    ("prompt", "labels", "says"),
    [
        ("x", ["a"], "the labels are a: give at least 2"),
        ("x", ["a", ""], "the label '' is empty"),
        ("x", ["a", "a"], "the label 'a' is there twice"),
        ("x", ["a", " a"], "the labels 'a' and ' a' have the same tokens"),
        ([120], ["a", "b"], "not token ids: give the prompt as text"),
        ("", ["a", "b"], "the prompt is empty"),
        ("x" * 250, ["a" * 9, "b"], "has 260 tokens, but .* can score at most 257"),
        ("x" * 300, ["a", "b"], "the prompt has 300 tokens"),
        ("x", ["a", "\ud83d"], "half a surrogate pair"),
    ],
)
def test_what_leaves_no_choice_is_refused(lm, prompt, labels, says):
    with pytest.raises(SpecbeamError, match=says):
        probabilities(lm, [prompt], labels, raw=True)


def test_calibrated_probabilities_are_divided_by_those_without_content(lm, theirs):
    labels, template = ["good", "good enough", "bad"], "Review: {}\nSentiment: "
    content_free = [template.format(text) for text in CONTENT_FREE]
    (found,) = probabilities(lm, [template.format("hi")], labels, content_free=content_free, raw=True)
    own, *without = (expected(theirs, lm, before, "", labels) for before in (template.format("hi"), *content_free))
    wanted = {label: own[label] / sum(each[label] for each in without) for label in labels}
    assert found == pytest.approx({label: share / sum(wanted.values()) for label, share in wanted.items()}, rel=1e-4)


def test_calibration_undoes_a_bias_towards_a_label(save, recwarn):
    """The last normalization's bias adds the same numbers to the logits of every row, so that it cancels."""
    model, labels, prompts = random_model("gpt2"), ["a", "b", "c"], [f"{number} " for number in range(60)]
    fair = specbeam.load(save(model), dtype="float32")
    favoured = head_of(model)[fair.tokenizer.convert_tokens_to_ids("b")]
    model.transformer.ln_f.bias.data += torch.tensor(favoured / (favoured @ favoured) * 12)
    biased = specbeam.load(save(model), dtype="float32")
    wanted = probabilities(fair, prompts, labels, content_free=[" "])
    assert not recwarn
    with pytest.warns(UserWarning, match=r"nearly all of 60 rows have one label \(60 b\): .* try content_free="):
        collapsed = probabilities(biased, prompts, labels)
    assert min(share["b"] for share in collapsed) > 0.9
    for found, expected in zip(probabilities(biased, prompts, labels, content_free=[" "]), wanted, strict=True):
        assert found == pytest.approx(expected, rel=1e-3)
    assert len(recwarn) == 0


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({"a": 45, "b": 5}, "nearly all of 50 rows have one label (45 a, 5 b): the prompt may favour it"),
        ({"a": 44, "b": 6}, None),
        ({"a": 49}, None),
        ({}, None),
    ],
)
def test_nine_in_ten_of_fifty_rows_are_a_collapse(counts, says):
    found = collapse(Counter(counts), "--calibrate")
    assert found == says if says is None else found.startswith(says)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompts": "one text"}, "prompts is a list, not str"),
        ({"labels": "ab"}, "labels is a list, not str"),
        ({"content_free": "N/A"}, "content_free is a list, not str"),
        ({"content_free": []}, "content_free: there are no prompts: give at least one"),
        ({"content_free": ["x", ""]}, "content_free: prompt 1: the prompt is empty"),
        ({"prompts": ["x", ""]}, "prompt 1: the prompt is empty"),
    ],
)
def test_lists_are_asked_for(lm, given, says):
    with pytest.raises(SpecbeamError, match=says):
        probabilities(lm, **({"prompts": ["x"], "labels": ["a", "b"]} | given))


@pytest.mark.models
def test_a_space_at_the_prompts_end_is_the_labels():
    """With whole tokens of a real tokenizer: the prompt's last space is no token of its own."""
    lm = specbeam.load(reference_model("smollm2-135m-instruct"))
    labels = ["positive", "negative"]
    prompts = ["Great shoes.\nSentiment:", "Great shoes.\nSentiment: "]
    without, with_space = probabilities(lm, prompts, labels, raw=True)
    assert without == with_space
    context, (positive, _) = encode_answers(lm, prompts[1], labels, raw=True)
    assert lm.tokenizer.decode(context) == prompts[0]
    assert lm.tokenizer.decode(positive) == " positive"
