"""Prefixes that requests share: no token is computed twice. That no text changes is in test_exactness.py."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import specbeam
from specbeam import Engine, SpecbeamError
from tests.backends.test_encoder_decoder import make
from tests.calls import calls_made
from tests.conftest import random_model, run_alone
from tests.decoding.test_speculative import other_tokenizer
from tests.engine.conftest import ended, in_use

PROMPT = [97 + n % 7 for n in range(60)]
LONG = {"max_new_tokens": 20, "min_new_tokens": 20}
GREEDY = {"max_new_tokens": 9}


@pytest.fixture(scope="module")
def conversing(save):
    """By backend: a target with sliding windows, and drafts with the same and with another tokenizer."""
    other = random_model("llama", seed=7, num_hidden_layers=2)
    models = random_model("mistral", sliding_window=8), random_model("llama", seed=1), other
    folders = [save(model, other_tokenizer() if model is models[2] else None) for model in models]
    made = {}

    def conversing(backend):
        if backend not in made:
            target, *drafts = (specbeam.load(folder, backend=backend) for folder in folders)
            made[backend] = target, dict(zip(["model", "other vocabulary"], drafts, strict=True))
        return made[backend]

    return conversing


@pytest.mark.parametrize("backend", ["cpu", "torch", "transformers"])
@pytest.mark.parametrize("draft", [None, "model", "other vocabulary"])
def test_a_turn_prefills_only_what_is_new(conversing, watch, backend, draft):
    lm, drafts = conversing(backend)
    draft = drafts.get(draft)
    engine, evaluated = Engine(lm), [watch(one) for one in filter(None, [lm, draft])]
    options = {"eos_token_id": [256], **({"num_draft_tokens": 1} if draft else {})}

    def turn(prompt, new_tokens=4):
        """The result, and the number of nodes that each model evaluates for a prompt."""
        for nodes in evaluated:
            nodes.clear()
        result = ended(engine, prompt, {"max_new_tokens": new_tokens, **options}, draft=draft)
        return result, [sum(nodes) for nodes in evaluated]

    first, nodes = turn(PROMPT)
    assert first.stats.reused_tokens == 0
    assert min(nodes) >= 60
    # The last new token was never evaluated.
    second, nodes = turn([*PROMPT, *(first.token_ids if draft is None else []), 101, 102])
    assert second.stats.reused_tokens == (63 if draft is None else 60)
    assert max(nodes) <= 20
    # The same prompt again: logits are needed after its last token.
    third, _ = turn(PROMPT, new_tokens=30)
    assert third.stats.reused_tokens == 59
    # Other tokens before the common ones change the meaning of these.
    fourth, nodes = turn([99, *PROMPT])
    assert fourth.stats.reused_tokens == 0
    if draft is drafts["other vocabulary"]:
        nodes.pop()  # it reads all of these tokens as the character for bytes that are no text
    assert min(nodes) >= 60


def test_a_draft_model_that_is_idle_for_a_turn_keeps_its_prefix(conversing, watch):
    lm, drafts = conversing("cpu")
    engine, nodes = Engine(lm), watch(drafts["model"])
    for new_tokens, read in ((9, range(60, 100)), (1, [0]), (9, range(1, 40))):  # one token needs no draft
        nodes.clear()
        ended(engine, PROMPT, {"max_new_tokens": new_tokens, "num_draft_tokens": 2}, draft=drafts["model"])
        assert sum(nodes) in read


@pytest.mark.parametrize(
    ("how", "reason"),
    [({"eos_token_id": []}, "length"), ({"eos_token_id": "a"}, "stop"), ({"stop_strings": ["a"]}, "stop")],
)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_finished_request_leaves_its_sequence(lm, how, reason, beams):
    a, b = lm.tokenizer("ab").input_ids
    how = {name: [a] if value == "a" else value for name, value in how.items()}

    def forced(ids, scores):  # b, b, b, a
        scores[:, a if len(ids[0]) > 12 else b] += 1000
        return scores

    engine = Engine(lm)
    got = ended(engine, [1] * 10, {"max_new_tokens": 6, "num_beams": beams, "logits_processor": [forced], **how})
    assert got.finish_reason == reason
    again = ended(engine, [1] * 10 + got.token_ids + [2], {"max_new_tokens": 20})
    assert again.stats.reused_tokens == 9 + len(got.token_ids)


def test_models_with_an_encoder_keep_nothing():
    """Their sequences begin alike, but their keys and values depend on the text that the encoder has read."""
    model = make("t5")
    model.generation_config.decoder_start_token_id = [256, 5, 5]
    lm = specbeam.hf.wrap(model)
    engine = Engine(lm)
    for prompt in ([*lm.backend.start_token_ids, 6, 7, 257], [*lm.backend.start_token_ids, 9, 8, 257]):
        got = ended(engine, prompt, GREEDY)
        assert got.stats.reused_tokens == 0
        assert got.token_ids == run_alone(lm, prompt, GREEDY).token_ids


def test_the_longest_common_prefix_is_taken(lm):
    engine = Engine(lm)

    def reused(prompt):
        return ended(engine, prompt, {"max_new_tokens": 1}).stats.reused_tokens

    assert [reused([1] * 10), reused([2] * 10), reused([1] * 12), reused([2] * 12)] == [0, 0, 10, 10]
    assert [reused([1] * 5 + [3] * 10), reused([1] * 12), reused([1] * 5 + [3] * 12)] == [5, 11, 15]
    together = [engine.submit([2] * 12 + [5] * n, {"max_new_tokens": 1}) for n in range(3)]
    engine.run()
    assert [one.result().stats.reused_tokens for one in together] == [11, 12, 12]
    assert ended(Engine(lm), [1] * 12, GREEDY).stats.reused_tokens == 0  # another engine


@pytest.mark.parametrize("backend", ["cpu", "torch", "transformers"])
@pytest.mark.parametrize("draft", [None, "model"])
def test_requests_with_one_prompt_prefill_it_once(conversing, backend, draft):
    """They are submitted together. The others wait for the first one, and evaluate their last token."""
    lm, drafts = conversing(backend)
    prompt = [97 + n % 20 for n in range(200)]
    engine = Engine(lm, max_requests=6, max_batch_tokens=128)
    options = [{"max_new_tokens": 6, "do_sample": True, "seed": seed} for seed in range(5)] + [GREEDY]
    requests = [engine.submit(prompt, one, draft=drafts.get(draft)) for one in options]
    used = []
    while engine.step():
        used.append(engine.cache_tokens)
    stats = [request.result().stats for request in requests]
    assert [one.reused_tokens for one in stats] == [0] + 5 * [199]
    assert sum(one.nodes_evaluated for one in stats) < len(options) * len(prompt) / 3
    assert max(used) < 200 + 6 * 40  # what they share counts once
    for request, one in zip(requests, options, strict=True):
        assert request.result().token_ids == run_alone(lm, prompt, one, drafts.get(draft)).token_ids


@pytest.mark.parametrize("ends", ["cancel", "fail"])
def test_who_waits_for_a_request_that_ends_prefills_itself(lm, ends, watch, monkeypatch):
    def fail(segments):
        if ends == "fail" and any(s.positions[0] == 100 for s in segments):
            raise RuntimeError("broken")

    prompt = [n % 20 for n in range(200)]
    engine = Engine(lm, max_batch_tokens=50)
    first, *others = [engine.submit(prompt, GREEDY) for _ in range(3)]
    watch(lm, fail)
    for _ in range(3):
        engine.step()
    monkeypatch.undo()
    if ends == "cancel":
        first.cancel()
    engine.run()
    assert first.done
    assert others[0].result().stats.reused_tokens in (100, 150)
    assert others[1].result().stats.reused_tokens in (150, 199)  # few tokens are not waited for
    for other in others:
        assert other.result().token_ids == run_alone(lm, prompt, GREEDY).token_ids


def test_a_request_may_share_nothing(lm):
    engine = Engine(lm)
    alone = GREEDY | {"share_prefix": False}
    assert ended(engine, PROMPT, GREEDY).stats.reused_tokens == 0
    assert ended(engine, PROMPT, alone).stats.reused_tokens == 0
    other = PROMPT[::-1]
    assert ended(engine, other, alone).stats.reused_tokens == 0
    assert ended(engine, other, GREEDY).stats.reused_tokens == 0  # it left nothing, either
    assert ended(engine, other, GREEDY).stats.reused_tokens == 59
    with pytest.raises(SpecbeamError, match="share_prefix=1 is not allowed: give true or false"):
        specbeam.Options(share_prefix=1)


def test_an_engine_gets_the_memory_that_another_engine_keeps(lm, monkeypatch):
    monkeypatch.setattr(lm.backend, "memory_for_caches", lambda: 100 * lm.backend.slot_bytes)
    before, keeping, other = in_use(lm), Engine(lm), Engine(lm)
    for n in (1, 2):
        ended(keeping, [n] * 20, LONG)
    assert in_use(lm) == before + 2 * 39
    assert len(ended(other, [3] * 60, LONG).token_ids) == 20
    assert in_use(lm) <= before + 100
    assert ended(keeping, [1] * 20, LONG).stats.reused_tokens < 19


def test_engines_in_threads_share_one_kv_cache(conversing):
    lm, _ = conversing("cpu")
    cases = [([97 + who] * 40 + [98] * n, GREEDY | {"num_beams": 1 + who % 2}) for who in range(3) for n in range(1, 6)]
    expected = [run_alone(lm, *case).sequences for case in cases]

    def work(who):
        engine = Engine(lm, max_cache_tokens=200, max_batch_tokens=16)
        for number in range(5 * who, 5 * who + len(cases)):
            assert ended(engine, *cases[number % len(cases)]).sequences == expected[number % len(cases)]
        assert engine.cache_tokens == 0

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(work, range(3))] == [None] * 3


def test_a_request_costs_the_same_however_many_ended_before(lm):
    def calls(earlier):
        engine = Engine(lm)
        for n in range(earlier):
            engine.submit([n, 1, 2], {"max_new_tokens": 2})
        engine.run()
        return calls_made(lambda: (engine.submit([250, 1, 2], {"max_new_tokens": 2}), engine.run()))

    assert calls(100) < 1.1 * calls(5)
