"""User-defined strategies, from every function that generates. Their mistakes are named."""

import pytest

import specbeam
from specbeam import SpecbeamError
from specbeam.core.strategy import Evaluate, Hypothesis
from specbeam.recording.receipts import Saved
from tests.conftest import run_alone

PROMPT = [5, 6, 7]
FILE = r"the strategy tests.engine.test_custom_strategy:\S+ \(.*test_custom_strategy.py, line \d+\)"


def greedy(setup, drafter):
    """Greedy search, and then the prompt as a second hypothesis."""
    tree, tip = setup.tree, setup.tree.tip
    while True:
        selection = yield Evaluate([tip], setup.selector(tree, [tip]))
        tip = tree.append(tip, selection.tokens[0, 0], selection.log_probs[0, 0])
        tree.keep(tip)
        if reason := setup.stop(tree, tip):
            best = Hypothesis(tip, float(tree.scores(tip)), reason)
            yield best
            return [best]


def starred(stars):
    return greedy


@pytest.mark.parametrize("strategy", [greedy, "tests.engine.test_custom_strategy:greedy"])
def test_every_function_takes_a_strategy(lm, strategy):
    plain = specbeam.generate(lm, PROMPT, max_new_tokens=6)
    own = specbeam.generate(lm, PROMPT, max_new_tokens=6, num_beams=2, strategy=strategy)
    assert (own.token_ids, own.text) == (plain.token_ids, plain.text)
    several = specbeam.generate(lm, [PROMPT, [1]], max_new_tokens=6, strategy=strategy)
    assert several[0].token_ids == plain.token_ids
    pieces = [*specbeam.stream(lm, PROMPT, max_new_tokens=6, strategy=strategy)]
    assert "".join(piece.text for piece in pieces) == plain.text
    assert [one.token_ids for one in specbeam.nbest(lm, PROMPT, max_new_tokens=6, strategy=strategy)] == [
        plain.token_ids
    ]


def test_a_strategy_may_use_a_drafter(lm):
    def drafting(setup, drafter):
        tree, tip = setup.tree, setup.tree.tip
        draft_tokens = yield from drafter.propose([tip], tree.scores([tip]))
        assert tree.tokens(draft_tokens.nodes).tolist() == [9, 8]
        selection = yield Evaluate([tip], setup.selector(tree, [tip]))
        tip = tree.append(tip, selection.tokens[0, 0], selection.log_probs[0, 0])
        return [Hypothesis(tip, 0.0, "length")]

    plain = specbeam.generate(lm, PROMPT, max_new_tokens=3)
    how = {"draft": lambda tokens, lm: [9, 8], "num_draft_tokens": 2}
    assert specbeam.generate(lm, PROMPT, strategy=drafting, max_new_tokens=3, **how).token_ids == plain.token_ids[:1]


def test_the_receipt_names_the_strategy_and_nobody_pretends_to_make_it_again(lm):
    result = specbeam.generate(lm, PROMPT, max_new_tokens=3, strategy=greedy)
    assert result.inputs["objects"] == ["strategy tests.engine.test_custom_strategy:greedy"]
    assert result.receipt != specbeam.generate(lm, PROMPT, max_new_tokens=3).receipt
    with pytest.raises(SpecbeamError, match=r"made with strategy tests.*:greedy, which no file can hold"):
        Saved.read(result.to_dict()).check(lm)


def returns_a_list(setup, drafter):
    return [Hypothesis(setup.tree.tip, 0.0, "length")]


def returns_nothing(setup, drafter):
    yield Evaluate([setup.tree.tip])


def yields_nodes(setup, drafter):
    yield [setup.tree.tip]


def asks_for_tokens(setup, drafter):
    yield Evaluate([40_000])


def asks_for_text(setup, drafter):
    yield Evaluate(["the"])


def adds_no_token(setup, drafter):
    tip = setup.tree.append(setup.tree.tip, 40_000, 0.0)
    yield Evaluate([tip])


def never_ends(setup, drafter):
    tip = setup.tree.tip
    while True:
        yield Evaluate([tip])
        tip = setup.tree.append(tip, 3, 0.0)


def returns_texts(setup, drafter):
    yield Evaluate([setup.tree.tip])
    return ["a text"]


def returns_a_node_that_is_not_there(setup, drafter):
    yield Evaluate([setup.tree.tip])
    return [Hypothesis(99, 0.0, "stop")]


def returns_no_hypothesis(setup, drafter):
    yield Evaluate([setup.tree.tip])
    return []


def raises(setup, drafter):
    selection = yield Evaluate([setup.tree.tip])
    return selection.toknes


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (returns_a_list, r"returned the list \[.*\], and no generator: ask for selections with yield, as in: sel"),
        (lambda setup, drafter: None, r"returned None, and no generator: ask for selections with yield"),
        (lambda setup, drafter: greedy, r"returned the function .*, and no generator: .*strategy=f\(\.\.\.\)"),
        (returns_nothing, r"returned None: return a list of Hypothesis\(node, score, finish_reason\), the best first"),
        (yields_nodes, r"yielded the list \[2\]: yield Evaluate\(nodes, request\), or a Hypothesis"),
        (asks_for_tokens, r"asked for the node 40000, and the tree has the nodes 0 to 2: give nodes, .* and no tokens"),
        (asks_for_text, r"asked for the nodes \['the'\]: give a list of at least one node"),
        (adds_no_token, r"added the token 40000 to the tree, and the vocabulary has 259: add token ids from 0 to 258"),
        (never_ends, r"goes on after 7 tokens, all that max_new_tokens or the context allows: end a sequence where"),
        (returns_texts, r"returned a list with the str 'a text': return a list of Hypothesis"),
        (returns_a_node_that_is_not_there, r"returned the node 99: give the last node of a sequence, below 3"),
        (returns_no_hypothesis, r"returned no hypothesis: return a list of Hypothesis.*, or change the options"),
        (raises, r"failed: AttributeError: .*toknes.* \(.*test_custom_strategy.py, line \d+\)"),
    ],
)
def test_a_mistake_ends_its_request_alone_and_is_named(lm, strategy, says):
    engine = specbeam.Engine(lm)
    bad = engine.submit(PROMPT, {"max_new_tokens": 4}, strategy=strategy)
    good = engine.submit([1], {"max_new_tokens": 4})
    engine.run()
    with pytest.raises(SpecbeamError, match=f"{FILE} {says}"):
        bad.result()
    assert good.result().token_ids == run_alone(lm, [1], {"max_new_tokens": 4}).token_ids


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (starred, rf"{FILE} takes \(stars\), but it is called with the setup and the drafter: .* or call it first"),
        (7, r"strategy=7 is not allowed: give a function of the setup and the drafter, module:name"),
        ("tests.engine.test_custom_strategy:gredy", r"has no 'gredy' \(did you mean 'greedy'\?\)"),
        ("beam", r"unknown strategy 'beam': no package declares a strategy; give one of your own as module:name"),
    ],
)
def test_what_is_no_strategy_is_refused_before_the_first_pass(lm, strategy, says):
    for submit in (specbeam.Engine(lm).submit, specbeam.Engine(lm).check):
        with pytest.raises(SpecbeamError, match=says):
            submit(PROMPT, strategy=strategy)
    with pytest.raises(SpecbeamError, match=r"strategy is no option: give it beside the options"):
        specbeam.Options(strategy=greedy)
