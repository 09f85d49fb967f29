"""Drafts of another vocabulary: draft tokens equal those from whole texts encoded anew, and cost less."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specbeam.backends.torch.sampling import select
from specbeam.core.tree import NO_NODES, Tree
from specbeam.drafting.policy import DraftTokens
from specbeam.drafting.retokenizing import RetokenizingDrafter
from tests.conftest import examples, fast_tokenizer

STORY = """The keeper of a lighthouse walked down to the sea, and saw that it was good. He said nothing about them!
"What's that?" asked the child; the keepers' 1,234 lamps were lit again. Señor 你好 walked home, unlike the others.
    def walk(down):
        return down + 1  # not walking, not walked
"""
PIECES = [*STORY.split(" "), *(f" {word}" for word in STORY.split()), "\n\n", "  ", "e", "walk", "2026", "😀", " é"]
DEPTH = 4


def byte_level(vocab_size, bos=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([STORY], trainer)
    return fast_tokenizer(tokenizer, bos_token=bos)


def metaspace(vocab_size, unigram=False):
    """As Llama's and T5's: a space before the first word, which texts leave out."""
    tokenizer = Tokenizer(models.Unigram() if unigram else models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=unigram)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    alphabet = sorted({c for piece in PIECES for c in piece})
    how = {"vocab_size": vocab_size, "initial_alphabet": alphabet, "show_progress": False}
    unknown = {"unk_token": "<unk>", "special_tokens": ["<unk>"]}
    trainer = trainers.UnigramTrainer(**how, **unknown) if unigram else trainers.BpeTrainer(**how)
    tokenizer.train_from_iterator(STORY.splitlines(keepends=True), trainer)
    return fast_tokenizer(tokenizer)


class GroupsFromTheEnd:
    """An odd tokenizer: one more character changes all tokens, since the text is split in groups from its end."""

    bos_token_id = None

    def __init__(self):
        self.groups = []  # by token id

    def __len__(self):
        return 1000  # more than there are groups

    def __call__(self, text, **options):
        groups = [text[max(0, end - 3) : end] for end in range(len(text), 0, -3)][::-1]
        self.groups += dict.fromkeys(group for group in groups if group not in self.groups)
        return SimpleNamespace(input_ids=[self.groups.index(group) for group in groups])

    def decode(self, ids, **options):
        return "".join(self.groups[i] for i in ids)


@pytest.fixture(scope="module")
def tokenizers():
    return {
        "small byte level": byte_level(270),
        "byte level": byte_level(500),
        "metaspace": metaspace(200),
        "unigram": metaspace(150, unigram=True),
        "with bos": byte_level(400, bos="<bos>"),
        "groups from the end": GroupsFromTheEnd(),
    }


class Model:
    """As much of a language model as the drafter uses. It counts the characters and tokens that its tokenizer gets."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.backend = SimpleNamespace(vocab_size=len(tokenizer), context_length=10**6)
        self.bos_token_id = tokenizer.bos_token_id
        self.work = 0
        self._after = dict(itertools.pairwise(tokenizer(STORY * 3).input_ids))

    @property
    def tokenizer(self):
        return self

    def __call__(self, text, **options):
        self.work += len(text)
        return self._tokenizer(text, **options)

    def decode(self, ids, skip_special_tokens=True):
        self.work += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def encode(self, text):
        return self(text, add_special_tokens=False).input_ids

    def next_token(self, token):
        return self._after.get(token, token // 2)


class Rounds:
    """Runs a drafter below tips, and has the chains of the target's tokens that it proposed."""

    def __init__(self, target, draft, prompt):
        self.target, self.draft = target, draft
        self.tree = Tree(prompt)
        controller = SimpleNamespace(shape=lambda num_tips: (1, DEPTH))
        self.drafter = RetokenizingDrafter(self.tree, SimpleNamespace(draft=self.take), controller, target, draft)

    def take(self, tips, found, width):
        self.found = dict(zip(tips.tolist(), found, strict=True))
        return DraftTokens(NO_NODES)

    def add(self, node, tokens):
        for token in tokens:
            (node,) = self.tree.add(node, token).tolist()
        return node

    def propose(self, tips):
        """The chain below each tip, or none."""
        self.tree.keep(tips)
        self.found, self.read = {}, []
        proposal = self.drafter.propose(np.array(tips), np.zeros(len(tips)))
        try:
            asked = next(proposal)
            tree = self.drafter.tree
            self.read = [tree.tokens(tree.path(node)).tolist() for node in asked.nodes]  # what the draft continues
            while True:
                chosen = [self.draft.next_token(token) for token in tree.tokens(asked.nodes).tolist()]
                logits = torch.nn.functional.one_hot(torch.tensor(chosen), self.draft.backend.vocab_size)
                asked = proposal.send(select(logits.float(), asked.selection_request))
        except StopIteration:
            return [self.found.get(tip, []) for tip in tips]

    def first_draft_token(self, tip):
        """The first of the draft's tokens for the whole text."""
        return self.draft.encode(self.target.decode(self.tree.tokens(self.tree.path(tip)).tolist()))[0]

    def whole(self, tip):
        """The chain by the texts as a whole."""
        path = self.tree.tokens(self.tree.path(tip)).tolist()
        text = self.target.decode(path)
        if text.endswith("\ufffd"):
            return []
        ids = self.draft.encode(text)
        more = [self.draft.next_token(ids[-1])]
        while len(more) < DEPTH:
            more.append(self.draft.next_token(more[-1]))
        new = self.draft.decode(ids + more)[len(self.draft.decode(ids)) :].rstrip("\ufffd")
        before, whole = self.target.encode(text), self.target.encode(text + new)
        return [whole[len(before) :] if whole[: len(before)] == before else self.target.encode(new)]


PAIRS = [  # target and draft
    ("byte level", "metaspace"), ("metaspace", "byte level"), ("small byte level", "byte level"),
    ("byte level", "unigram"), ("unigram", "small byte level"), ("small byte level", "with bos"),
]  # fmt: skip


def prompt_of(target, tokens, length):
    """At least this many of the first tokens, which end with a character."""
    while target.decode(tokens[:length]).endswith("\ufffd"):
        length += 1
    return tokens[:length]


@pytest.mark.parametrize("pair", PAIRS, ids=" with ".join)
@settings(max_examples=examples(0.3))
@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=20, max_size=150),
    steps=st.lists(st.integers(1, 9), min_size=10, max_size=20),
    prompt_length=st.integers(3, 60),
)
@example(pieces=["a", *["The"] * 19], steps=[1], prompt_length=3)  # a run of letters whose first token changes
def test_draft_tokens_are_those_of_the_whole_text(tokenizers, pair, pieces, steps, prompt_length):
    target, draft = (Model(tokenizers[name]) for name in pair)
    tokens = target.encode("The" + "".join(pieces))
    rounds = Rounds(target, draft, prompt_of(target, tokens, prompt_length))
    tip = rounds.tree.tip
    root = rounds.first_draft_token(tip)
    for step in itertools.cycle(steps):
        if rounds.first_draft_token(tip) != root:  # the draft does not read its text from the beginning again
            break
        assert rounds.propose([tip]) == [rounds.whole(tip)]
        position = int(rounds.tree.depths(tip)) + 1
        if position + step > len(tokens):
            break
        tip = rounds.add(tip, tokens[position : position + step])


@pytest.mark.parametrize("pair", PAIRS, ids=" with ".join)
@settings(max_examples=examples(0.2))
@given(seed=st.integers(0, 1000))
def test_draft_tokens_of_beams_are_those_of_their_whole_texts(tokenizers, pair, seed):
    """Tips whose texts share a beginning; some rounds have no draft."""
    target, draft = (Model(tokenizers[name]) for name in pair)
    random = np.random.default_rng(seed)
    begin = target.encode("The")
    words = [target.encode("The" + w)[len(begin) :] for w in (" sea", " walked", " home", " said", ".", "\n")]
    rounds = Rounds(target, draft, begin)
    tips = [rounds.tree.tip]
    for _ in range(30):
        parents = random.choice(tips, 3)
        tips = sorted({rounds.add(node, words[random.integers(len(words))]) for node in parents.tolist()})
        if random.random() < 0.4:
            rounds.tree.keep(tips)
        else:
            assert rounds.propose(tips) == [rounds.whole(tip) for tip in tips]


def test_a_draft_reads_all_text_with_an_odd_tokenizer_too(tokenizers):
    target, draft = Model(tokenizers["byte level"]), Model(tokenizers["groups from the end"])
    tokens = target.encode("".join(c for c in STORY * 2 if c.isascii()))
    rounds = Rounds(target, draft, tokens[:1])
    for n, token in enumerate(tokens[1:], start=2):
        rounds.propose([rounds.add(rounds.tree.tip, [token])])
        assert [draft.decode(ids) for ids in rounds.read] == [target.decode(tokens[:n])]


@pytest.mark.parametrize("pair", PAIRS, ids=" with ".join)
def test_work_does_not_grow_with_the_text(tokenizers, pair):
    """Counts the characters and tokens handed to the tokenizers."""
    target, draft = (Model(tokenizers[name]) for name in pair)
    tokens = target.encode(STORY * 10)
    rounds = Rounds(target, draft, tokens[:100])
    work = []
    for begin in range(100, 1000, 10):
        target.work = draft.work = 0
        rounds.propose([rounds.add(rounds.tree.tip, tokens[begin : begin + 10])])
        work.append(target.work + draft.work)
    assert sum(work[-30:]) < 1.2 * sum(work[1:31])
