"""Distinct n-best: against the search written out over whole sequences, and with drafts."""

import itertools
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

import specbeam
from specbeam import TokenTrie
from tests.conftest import examples, fast_tokenizer, random_model

VOCABULARY = {"a": 0, "b": 1, "ab": 2, "ba": 3, "<e>": 4, "<end>": 5}
ENDS = [4, 5]
PROMPT = [3, 0]
TINY = {"vocab_size": 6, "eos_token_id": 4, "bos_token_id": 0, "initializer_range": 0.25}


def spelling_tokenizer():
    """Texts of the letters a and b, which have several spellings."""
    tokenizer = Tokenizer(models.BPE(VOCABULARY, [("a", "b"), ("b", "a")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<e>", "<end>"])
    return fast_tokenizer(tokenizer, eos_token="<e>")


def text_of(tokens):
    return "".join(text for token in tokens for text, number in VOCABULARY.items() if number == token and token < 4)


@pytest.fixture(scope="session")
def spellings(save):
    """Tiny models by seed, as transformers and as we run them, with two end tokens and several spellings of a text."""
    made = {}

    def spellings(seed):
        if seed not in made:
            model = random_model("llama", seed=seed, **TINY)
            made[seed] = model, specbeam.load(save(model, spelling_tokenizer()), device="cpu", dtype="float32")
        return made[seed]

    return spellings


@cache
def log_probs_of(model):
    """A function: the log-probabilities of the next token after the prompt and some tokens, by transformers' model."""

    @cache
    @torch.no_grad()
    def log_probs(tokens):
        return model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1].log_softmax(-1).tolist()

    return log_probs


def written_out(log_probs, num_beams, length, length_penalty, early_stopping=False, ends=ENDS, text_of=text_of):
    """Beam search over whole sequences that keeps different texts, best first: [(text, score)].

    Ties go to the better beam, then to the likelier token, then to the lower id.
    """
    beams, places = [((), 0.0)], {}
    for step in range(1, length + 1):
        grown = [
            ((*tokens, token), score + log_prob, (rank, -log_prob, token))
            for rank, (tokens, score) in enumerate(beams)
            for token, log_prob in enumerate(log_probs(tokens))
        ]
        grown = sorted(grown, key=lambda one: (-one[1], one[2]))[: (1 + len(ends)) * num_beams]
        beams, seen = [], {}
        for tokens, score, _ in grown:
            if tokens[-1] in ends or step == length:
                seen.setdefault(text_of(tokens), (len(seen), score))
            else:
                seen[tokens] = len(seen), None
                beams.append((tokens, score))
        stopped = early_stopping is True and len(places) == num_beams
        for text, (rank, score) in seen.items():
            if rank < num_beams and score is not None and not stopped:
                places[text] = max(score / step**length_penalty, places.get(text, -1e9))
        places = dict(sorted(places.items(), key=lambda pair: -pair[1])[:num_beams])
        beams = beams[:num_beams]
        if not beams or len(places) < num_beams:
            continue
        hopeful = length if early_stopping == "never" and length_penalty > 0 else step
        if early_stopping is True or beams[0][1] / hopeful**length_penalty <= min(places.values()):
            break
    return [*places.items()]


@settings(max_examples=examples(4))
@given(
    draft=st.sampled_from([None, "ngram", "model", "same"]),
    seed=st.integers(0, 3),
    num_beams=st.integers(2, 8),
    length=st.integers(1, 7),
    length_penalty=st.sampled_from([0.0, 1.0, 2.0, -1.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    data=st.data(),
)
def test_distinct_beams_are_the_search_written_out_with_any_draft(
    spellings, draft, seed, num_beams, length, length_penalty, early_stopping, data
):
    model, lm = spellings(seed)
    drafts = {"model": spellings(seed + 1)[1], "same": lm}
    options = {"num_beams": num_beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
    expected = written_out(log_probs_of(model), length=length, **options)
    n = data.draw(st.integers(1, num_beams))
    options |= {"max_new_tokens": length, "eos_token_id": ENDS, "distinct": True, "num_return_sequences": n}
    if draft is not None:
        options |= {"draft": drafts.get(draft, draft), "num_draft_tokens": 3}
        options["draft_width"] = data.draw(st.integers(1, 8))
    result = specbeam.generate(lm, PROMPT, **options)
    assert [s.text for s in result.sequences] == [text for text, _ in expected[:n]]
    assert [s.score for s in result.sequences] == pytest.approx([score for _, score in expected[:n]], abs=1e-4)
    assert [s.text for s in specbeam.nbest(lm, PROMPT, **options)] == [text for text, _ in expected[:n]]


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_four_cities_are_four_texts(spellings, draft):
    """The issue's example: two end tokens, and as many beams as outputs."""
    for seed, count in itertools.product(range(3), (2, 3, 4)):
        _, lm = spellings(seed)
        trie = TokenTrie([[0, 0], [0, 1, 1], [1], [1, 3, 0]][:count])
        options = {"constraint": trie, "num_beams": count, "num_return_sequences": count, "eos_token_id": ENDS}
        texts = [s.text for s in specbeam.generate(lm, PROMPT, draft=draft, **options).sequences]
        assert sorted(texts) == sorted(["aa", "abb", "b", "bbaa"][:count])
        assert [s.text for s in specbeam.nbest(lm, PROMPT, draft=draft, **options)] == texts


def test_beams_end_an_output_with_the_likeliest_end_token(spellings):
    model, lm = spellings(0)
    log_probs = log_probs_of(model)
    options = {"constraint": TokenTrie([[0], [1, 1]]), "num_beams": 4, "num_return_sequences": 4, "distinct": False}
    sequences = specbeam.generate(lm, PROMPT, eos_token_id=ENDS, **options).sequences
    assert len(sequences) == 2
    for sequence in sequences:
        *output, end = sequence.token_ids
        assert end == max(ENDS, key=lambda token: log_probs(tuple(output))[token])


def test_samples_in_a_trie_may_end_with_any_end_token(spellings):
    _, lm = spellings(0)
    options = {"constraint": TokenTrie([[0]]), "eos_token_id": ENDS, "do_sample": True, "num_return_sequences": 50}
    assert {s.token_ids[-1] for s in specbeam.generate(lm, PROMPT, seed=1, **options).sequences} == {*ENDS}


def test_without_a_tokenizer_texts_are_their_tokens_without_the_end(spellings):
    model, _ = spellings(0)
    lm = specbeam.hf.wrap(model)
    options = {"num_beams": 24, "num_return_sequences": 24, "max_new_tokens": 3, "eos_token_id": ENDS, "distinct": True}
    texts = [s.token_ids for s in specbeam.generate(lm, PROMPT, **options).sequences]
    assert len({*[tuple(t for t in text if t not in ENDS) for text in texts]}) == 24
    assert len({text_of(text) for text in texts}) < 24  # spellings of one text


def test_groups_and_drawn_beams_return_each_text_once(spellings):
    _, lm = spellings(1)
    options = {"num_beams": 6, "num_return_sequences": 6, "max_new_tokens": 4, "eos_token_id": ENDS, "distinct": True}
    for how in ({"num_beam_groups": 2, "diversity_penalty": 0.1}, {"temperature": 2.0, "seed": 3}):
        texts = [s.text for s in specbeam.generate(lm, PROMPT, **options, **how).sequences]
        assert len(texts) == len({*texts}) > 2


IDS = {"<1>": 4, "<2>": 5, "<3>": 6}  # special tokens: no text shows them


@pytest.fixture(scope="module")
def identifiers(save):
    """A model whose tokenizer has special tokens for identifiers."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<e>", *IDS])
    fast = fast_tokenizer(tokenizer, eos_token="<e>")
    changes = TINY | {"vocab_size": 7, "eos_token_id": 3}
    return specbeam.load(save(random_model("llama", **changes), fast), backend="cpu", dtype="float32")


DRAFTS = [None, "ngram", "itself"]


@pytest.mark.parametrize("draft", DRAFTS)
def test_identifiers_of_special_tokens_are_different_texts(identifiers, draft):
    outputs = [*itertools.product(IDS.values(), repeat=2)]
    options = {"constraint": TokenTrie(outputs), "num_beams": 9, "num_return_sequences": 9}
    draft = identifiers if draft == "itself" else draft
    sequences = specbeam.generate(identifiers, [0, 1], draft=draft, **options).sequences
    assert sorted(tuple(s.token_ids[:-1]) for s in sequences) == outputs
    assert {s.text for s in sequences} == {""}


@pytest.mark.parametrize("draft", DRAFTS)
def test_identifiers_before_a_stop_string_are_different_texts(identifiers, draft):
    """Two spellings of one text before the stop string are one text, and what follows it makes no difference."""
    outputs = [[4, 1], [5, 1], [1], [4, 0, 1], [4, 2], [0, 5, 1], [5, 0, 1]]
    options = {"constraint": TokenTrie(outputs), "num_beams": 7, "num_return_sequences": 7, "stop_strings": "b"}
    draft = identifiers if draft == "itself" else draft
    sequences = specbeam.generate(identifiers, [0, 1], draft=draft, **options).sequences
    before = ["".join({0: "a", 2: "a", 1: ""}.get(t, str(t)) for t in s.token_ids) for s in sequences]
    assert sorted(before) == sorted(["4", "5", "", "4a", "a5", "5a"])
    assert sorted(s.text for s in sequences) == ["", "", "", "a", "a", "a"]


def test_an_end_token_may_end_a_stop_string(identifiers):
    ends = {"eos_token_id": [3, 1], "stop_strings": "ab", "num_beams": 4, "num_return_sequences": 4, "distinct": True}

    def allowed(_, ids):
        return [0, 3] if len(ids) == 2 else [1]  # "ab", or nothing

    result = specbeam.generate(identifiers, [0, 1], max_new_tokens=4, prefix_allowed_tokens_fn=allowed, **ends)
    assert [s.text for s in result.sequences] == [""]
