"""Prefixes kept between requests: no token is read twice, and no text changes."""

import gc
import weakref
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specbeam
from specbeam import Engine, SpecbeamError
from specbeam.engine.strategies import make_strategy
from tests.backends.test_encoder_decoder import make
from tests.conftest import examples, random_model
from tests.decoding.test_speculative import other_tokenizer
from tests.engine.test_interrupts import run_until

PROMPT = [97 + n % 7 for n in range(60)]
LONG = {"max_new_tokens": 20, "min_new_tokens": 20}
GREEDY = {"max_new_tokens": 9}
KINDS = [
    (GREEDY, None),
    ({"max_new_tokens": 8, "do_sample": True, "seed": 5}, None),
    ({"max_new_tokens": 7, "num_beams": 3, "num_return_sequences": 2}, None),
    ({"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3, "seed": 2}, None),
    (GREEDY, "ngram"),
    ({"max_new_tokens": 6, "num_beams": 2}, "suffix"),
    ({"max_new_tokens": 8, "num_draft_tokens": 3}, "model"),
    ({"max_new_tokens": 8, "do_sample": True, "seed": 3, "num_draft_tokens": 2, "draft_width": 2}, "model"),
    ({"max_new_tokens": 6, "num_beams": 3, "num_draft_tokens": 2}, "model"),
    ({"max_new_tokens": 8, "num_draft_tokens": 3}, "other vocabulary"),
    ({"max_new_tokens": 6, "num_beams": 2, "num_draft_tokens": 2}, "other vocabulary"),
]
TURN = st.fixed_dictionaries(
    {
        "forgotten": st.sampled_from([0, 0, 0, 1, 4, 15, 1000]),  # tokens at the end of the conversation so far
        "who": st.integers(0, 1),  # which of two conversations goes on
        "said": st.lists(st.integers(97, 122), min_size=1, max_size=12),
        "kind": st.sampled_from(KINDS),
        "ends": st.sampled_from([None, None, None, "cancel", "interrupt", "failure"]),
        "passes": st.integers(0, 8),  # before it ends so
    }
)


class Broken(Exception):
    """A pass fails."""


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


def run(engine, request, ends=None, passes=0):
    """Run a request to its end, or to the pass of the target at which something ends it."""
    forward, done = engine.lm.backend.forward, 0

    def counted(segments):
        nonlocal done
        done += 1
        if done > passes and ends in ("interrupt", "failure"):
            raise KeyboardInterrupt if ends == "interrupt" else Broken
        return forward(segments)

    with mock.patch.object(engine.lm.backend, "forward", counted):
        try:
            while engine.step():
                if done >= passes and ends == "cancel":
                    request.cancel()
        except KeyboardInterrupt:
            request.cancel()
            engine.step()


def result(lm, prompt, options, draft=None):
    engine = Engine(lm)
    request = engine.submit(prompt, options, draft=draft)
    engine.run()
    return request.result()


def converse(lm, drafts, turns, max_kept_prefixes):
    """Hold two conversations with kept prefixes. Yield the results of each turn, and what it is without them."""
    engine, conversations = Engine(lm, max_kept_prefixes=max_kept_prefixes, max_batch_tokens=16), [[], []]
    for turn in turns:
        options, draft = turn["kind"]
        conversation = conversations[turn["who"]]
        prompt = [*conversation[: max(0, len(conversation) - turn["forgotten"])], *turn["said"]]
        if draft == "other vocabulary" and any(token > 127 for token in prompt):
            draft = "model"  # these bytes may be no text
        draft = drafts.get(draft, draft)
        request = engine.submit(prompt, options, draft=draft)
        run(engine, request, turn["ends"], turn["passes"])
        assert request.done
        assert engine.cache_tokens == 0
        conversations[turn["who"]] = prompt
        try:
            got = request.result()
        except Broken:
            continue
        conversations[turn["who"]] = prompt + got.token_ids
        yield got, result(lm, prompt, options, draft), draft


@given(turns=st.lists(TURN, min_size=2, max_size=6), most=st.integers(1, 3))
def test_conversations_are_the_same_bit_for_bit(conversing, turns, most):
    for got, anew, draft in converse(*conversing("cpu"), turns, most):
        if got.finish_reason == "cancelled":
            assert got.token_ids == anew.token_ids[: len(got.token_ids)]
        else:
            assert got.sequences == anew.sequences
            if draft is None:
                assert got.stats.reused_tokens + got.stats.nodes_evaluated == anew.stats.nodes_evaluated
                assert got.stats.peak_slots == anew.stats.peak_slots


@pytest.mark.parametrize("backend", ["torch", "transformers"])
@settings(max_examples=examples(0.3))
@given(turns=st.lists(TURN, min_size=2, max_size=4), most=st.integers(1, 3))
def test_conversations_are_the_same_on_every_backend(conversing, backend, turns, most):
    for got, anew, _ in converse(*conversing(backend), turns, most):
        if got.finish_reason == "cancelled":
            assert got.token_ids == anew.token_ids[: len(got.token_ids)]
        else:
            assert [one.token_ids for one in got.sequences] == [one.token_ids for one in anew.sequences]


@pytest.mark.parametrize("backend", ["cpu", "torch", "transformers"])
@pytest.mark.parametrize("draft", [None, "model", "other vocabulary"])
def test_a_turn_reads_only_what_is_new(conversing, backend, draft):
    lm, drafts = conversing(backend)
    draft = drafts.get(draft)
    engine = Engine(lm, max_kept_prefixes=1)
    options = {"eos_token_id": [256], **({"num_draft_tokens": 1} if draft else {})}

    def turn(prompt, new_tokens=4):
        """Nodes that each model evaluates for a prompt, and the result."""
        nodes = {}
        for one in filter(None, [lm, draft]):
            forward = one.backend.forward

            def counted(segments, one=one, forward=forward):
                nodes[one] = nodes.get(one, 0) + sum(len(s.tokens) for s in segments)
                return forward(segments)

            one.backend.forward = counted
        try:
            request = engine.submit(prompt, {"max_new_tokens": new_tokens, **options}, draft=draft)
            engine.run()
        finally:
            for one in filter(None, [lm, draft]):
                del one.backend.forward
        return request.result(), nodes

    prompt = PROMPT
    first, nodes = turn(prompt)
    assert first.stats.reused_tokens == 0
    assert all(number >= 60 for number in nodes.values())
    # The last token of the answer was never evaluated.
    second, nodes = turn(prompt + first.token_ids + [101, 102]) if draft is None else turn([*prompt, 101, 102])
    assert second.stats.reused_tokens == (63 if draft is None else 60)
    assert all(number <= 20 for number in nodes.values())
    # The same prompt again: logits are needed after its last token.
    third, _ = turn(second_prompt := prompt[:50], new_tokens=30)
    assert third.stats.reused_tokens == len(second_prompt) - 1
    # Other tokens before the common ones change the meaning of these.
    fourth, nodes = turn([99, *prompt])
    assert fourth.stats.reused_tokens == 0
    assert all(number >= 61 for number in nodes.values())


def test_slots_that_the_kept_text_does_not_need_are_free(conversing):
    lm, _ = conversing("cpu")
    engine = Engine(lm, max_kept_prefixes=1)
    beams = ended(engine, PROMPT, LONG | {"num_beams": 8})
    prompt = PROMPT + beams.token_ids + PROMPT
    got, anew = ended(engine, prompt, LONG), result(lm, prompt, LONG)
    assert got.stats.reused_tokens > len(PROMPT)
    assert beams.stats.peak_slots > len(PROMPT) + 20  # beams lay between the slots of the text
    assert got.stats.peak_slots == anew.stats.peak_slots
    assert got.sequences == anew.sequences


def test_a_draft_that_rests_for_a_turn_keeps_its_text(conversing):
    lm, drafts = conversing("cpu")
    draft, nodes = drafts["model"], []
    forward = draft.backend.forward

    def counted(segments):
        nodes.append(sum(len(s.tokens) for s in segments))
        return forward(segments)

    engine = Engine(lm, max_kept_prefixes=1)
    with mock.patch.object(draft.backend, "forward", counted):
        for new_tokens, read in ((9, range(60, 100)), (1, [0]), (9, range(1, 40))):  # one token needs no draft
            nodes.clear()
            ended(engine, PROMPT, {"max_new_tokens": new_tokens, "num_draft_tokens": 2}, draft=draft)
            assert sum(nodes) in read


def test_a_cache_that_was_taken_over_grows_by_steps(conversing):
    lm, _ = conversing("cpu")
    new_cache, capacities = lm.backend.new_cache, []

    def watched(most):
        cache = new_cache(most)

        def reserve(slots):
            type(cache).reserve(cache, slots)
            capacities.append(cache.capacity)

        cache.reserve = reserve
        return cache

    engine = Engine(lm, max_kept_prefixes=1)
    with mock.patch.object(lm.backend, "new_cache", watched):
        ended(engine, PROMPT, {"max_new_tokens": 1})
        ended(engine, PROMPT, {"max_new_tokens": 120, "min_new_tokens": 120})
    assert len(capacities) > 120
    assert len(set(capacities)) < 10


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_draft_model_takes_no_cache_of_another(conversing, backend):
    lm, drafts = conversing(backend)
    engine = Engine(lm, max_kept_prefixes=1)
    for draft in ("model", "other vocabulary", None, "model", "model"):
        draft = drafts.get(draft)
        got = ended(engine, PROMPT, GREEDY, draft=draft)
        assert got.token_ids == result(lm, PROMPT, GREEDY).token_ids


def test_the_longest_common_beginning_is_taken(lm):
    engine = Engine(lm, max_kept_prefixes=2)

    def reused(prompt):
        request = engine.submit(prompt, {"max_new_tokens": 1})
        engine.run()
        return request.result().stats.reused_tokens

    assert [reused([1] * 10), reused([2] * 10), reused([1] * 12), reused([2] * 12)] == [0, 0, 10, 10]
    assert [reused([3] * 10), reused([1] * 12), reused([2] * 12)] == [0, 0, 0]  # each made room for the next
    together = [engine.submit([2] * 12 + [5] * n, {"max_new_tokens": 1}) for n in range(3)]
    engine.run()
    assert sorted(one.result().stats.reused_tokens for one in together) == [0, 0, 11]  # one request takes a cache


@pytest.mark.parametrize("most", [2, 4])
def test_conversations_take_turns(lm, most):
    """Their prompts begin alike, as prompts of one chat template do."""
    engine = Engine(lm, max_kept_prefixes=most)
    conversations = [[256, 10, 11, 12] + [20 + who] * 8 for who in range(2)]
    for turn in range(4):
        for who, prompt in enumerate(conversations):
            got = ended(engine, prompt, {"max_new_tokens": 3, "min_new_tokens": 3})
            # The last token of an answer is not evaluated. The first turn of the second one may share the beginning.
            assert turn == 0 or got.stats.reused_tokens == len(prompt) - 6
            conversations[who] = [*prompt, *got.token_ids, 30 + who, 40, 41, 42, 43]


def test_a_prompt_that_shares_little_leaves_the_kept_text(lm):
    engine = Engine(lm, max_kept_prefixes=2)
    text = [256, *range(100)]

    def reused(prompt):
        return ended(engine, prompt, {"max_new_tokens": 60, "min_new_tokens": 1}).stats.reused_tokens

    ended(engine, text, {"max_new_tokens": 1})
    assert reused([256, 9, 9, 9]) == 0
    assert reused([*text, 5, 5]) == 101


def test_the_oldest_text_goes_in_any_case_once_there_are_enough(lm):
    engine = Engine(lm, max_kept_prefixes=2)
    one_token = {"max_new_tokens": 1}
    for prompt in ([1] * 10 + [2] * 30, [3] * 10 + [4] * 30):
        ended(engine, prompt, one_token)
    assert ended(engine, [3] * 10 + [5] * 40, one_token).stats.reused_tokens == 0  # the younger one stays
    for prompt in ([1] * 10 + [2] * 30, [3] * 10 + [4] * 30):
        ended(engine, prompt, one_token)
    assert ended(engine, [1] * 10 + [5] * 40, one_token).stats.reused_tokens == 10


@pytest.mark.parametrize(
    ("how", "reason"),
    [({"eos_token_id": []}, "length"), ({"eos_token_id": "a"}, "stop"), ({"stop_strings": ["a"]}, "stop")],
)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_finished_request_leaves_its_text(lm, how, reason, beams):
    a, b = lm.tokenizer("ab").input_ids
    how = {name: [a] if value == "a" else value for name, value in how.items()}

    def forced(ids, scores):  # b, b, b, a
        scores[:, a if len(ids[0]) > 12 else b] += 1000
        return scores

    engine = Engine(lm, max_kept_prefixes=1)
    options = {"max_new_tokens": 6, "num_beams": beams, "logits_processor": [forced], **how}
    got = ended(engine, [1] * 10, options)
    assert got.finish_reason == reason
    again = ended(engine, [1] * 10 + got.token_ids + [2], {"max_new_tokens": 20})
    assert again.stats.reused_tokens == 9 + len(got.token_ids)


MANY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": True, "seed": 0, "num_return_sequences": 20}


def test_no_request_fails_because_a_large_cache_is_kept(conversing):
    lm, drafts = conversing("cpu")
    prompt = list(range(40))
    engine = Engine(lm, max_cache_tokens=270, max_kept_prefixes=1)
    ended(engine, prompt, MANY)  # 20 texts of 12 tokens lie in its cache
    got = ended(engine, [*prompt, 1], {"max_new_tokens": 12, "num_draft_tokens": 2}, draft=drafts["model"])
    assert got.token_ids == result(lm, [*prompt, 1], {"max_new_tokens": 12}).token_ids


def test_a_request_that_outgrows_the_memory_gives_up_what_it_took_over(conversing):
    """Eight beams and the unused cache of the draft do not fit together. Without kept prefixes the beams do."""
    lm, models = conversing("cpu")
    drafted = {"draft": models["model"]}
    ends_early = {"max_new_tokens": 40, "min_new_tokens": 18, "eos_token_id": list(range(258))}
    beams = {**ends_early, "num_beams": 8, "early_stopping": True, "num_draft_tokens": 1, "draft_width": 1}
    results = []
    for most in (0, 1):
        engine = Engine(lm, max_cache_tokens=230, max_kept_prefixes=most)
        ended(engine, PROMPT[:40], {"max_new_tokens": 40, "min_new_tokens": 40, "num_draft_tokens": 1}, **drafted)
        # A strategy of one's own need not draft.
        results.append(
            ended(engine, PROMPT[:40], beams, **drafted, strategy=lambda setup, drafter: make_strategy(setup, None))
        )
    assert results[0].sequences == results[1].sequences
    assert results[0].stats.peak_slots == results[1].stats.peak_slots > 150


def test_requests_after_a_large_one_read_no_prompt_twice(lm):
    engine = Engine(lm, max_cache_tokens=300, max_kept_prefixes=1)
    ended(engine, prompt := list(range(40)), MANY)
    requests = [engine.submit([*prompt, n], LONG) for n in range(4)]
    engine.run()
    assert [one.result().stats.nodes_evaluated for one in requests] == [60] * 4


def test_a_cache_that_was_taken_over_counts_when_others_are_admitted(lm):
    """Else the younger request would begin, pause at once, and lose the cache that it took over itself."""
    engine = Engine(lm, max_cache_tokens=100, max_kept_prefixes=2)
    ended(engine, [1] * 10, {"max_new_tokens": 15, "min_new_tokens": 15, "num_beams": 4})  # 66 slots
    ended(engine, [2] * 20, {"max_new_tokens": 1})
    ends_early = {"max_new_tokens": 80, "min_new_tokens": 10, "eos_token_id": list(range(258))}
    requests = [engine.submit([1] * 12, ends_early), engine.submit([2] * 20 + [5] * 40, {"max_new_tokens": 5})]
    engine.run()
    assert [one.result().stats.reused_tokens for one in requests] == [10, 20]


def watch_caches(lm, monkeypatch):
    """A function that returns the slots of all caches of the model that are alive."""
    new_cache, alive = lm.backend.new_cache, weakref.WeakKeyDictionary()

    def watched(most):
        cache = new_cache(most)
        reserve, alive[cache], me = type(cache).reserve, 0, weakref.ref(cache)

        def watch(slots):
            alive[me()] = max(alive[me()], slots)
            reserve(me(), slots)

        cache.reserve = watch
        return cache

    monkeypatch.setattr(lm.backend, "new_cache", watched)
    return lambda: sorted(alive.values())


@pytest.fixture
def caches(lm, monkeypatch):
    return watch_caches(lm, monkeypatch)


def ended(engine, prompt, options=LONG, **how):
    request = engine.submit(prompt, options, **how)
    engine.run()
    return request.result()


def test_nothing_is_kept_unless_asked_for(lm, caches):
    engine = Engine(lm)
    ended(engine, [1] * 10)
    assert caches() == []
    assert ended(engine, [1] * 10).stats.reused_tokens == 0


def test_as_many_caches_are_kept_as_asked_for(lm, tiny, caches):
    engine = Engine(lm, max_kept_prefixes=2)
    for n in range(1, 6):
        ended(engine, [n] * 10)
        assert caches() == [29] * min(n, 2)
    ended(engine, [5] * 10, draft=lm)  # a draft has a cache of its own
    assert len(caches()) == 3
    engine.submit([1] * 10, {**LONG, "logits_processor": [lambda ids, scores: 1 / 0]})
    engine.submit([7] * 10, {**LONG, "logits_processor": [lambda ids, scores: 1 / 0]})
    engine.run()
    assert len(caches()) == 3  # failed requests leave nothing
    handle = engine.submit([1] * 10, LONG)
    engine.run()
    del engine
    assert handle.done
    assert caches() == []


def test_models_with_an_encoder_keep_nothing():
    """Their texts begin alike, but their keys and values depend on the text that the encoder has read."""
    model = make("t5")
    model.generation_config.decoder_start_token_id = [256, 5, 5]
    lm = specbeam.hf.wrap(model)
    engine = Engine(lm, max_kept_prefixes=1)
    for prompt in ([*lm.backend.start_token_ids, 6, 7, 257], [*lm.backend.start_token_ids, 9, 8, 257]):
        got = ended(engine, prompt, GREEDY)
        assert got.stats.reused_tokens == 0
        assert got.token_ids == result(lm, prompt, GREEDY).token_ids


@given(
    tokens=st.integers(40, 120),
    kinds=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 20), st.sampled_from([1, 1, 3])), max_size=8
    ),
)
def test_kept_caches_and_requests_stay_within_the_memory(lm, tokens, kinds):
    with pytest.MonkeyPatch.context() as patch:
        caches = watch_caches(lm, patch)
        engine = Engine(lm, max_cache_tokens=tokens, max_kept_prefixes=3, max_batch_tokens=32)
        wishes = [
            ([first, *[8] * length], {"max_new_tokens": new_tokens, "num_beams": beams})
            for first, length, new_tokens, beams in kinds
        ]
        requests = []
        for number, wish in enumerate(wishes):
            try:
                requests.append((engine.submit(*wish), wish))
            except SpecbeamError:
                continue
            while number % 2 and engine.step():
                assert sum(caches()) <= tokens
        while engine.step():
            assert sum(caches()) <= tokens
    for request, wish in requests:
        try:
            got = request.result()
        except SpecbeamError:
            with pytest.raises(SpecbeamError, match="cache slots"):  # it fails because of its own size
                ended(Engine(lm, max_cache_tokens=tokens, max_batch_tokens=32), *wish)
        else:
            assert [s.token_ids for s in got.sequences] == [s.token_ids for s in result(lm, *wish).sequences]


def test_requests_get_the_memory_of_kept_caches(lm, caches):
    engine = Engine(lm, max_cache_tokens=70, max_kept_prefixes=3)
    for n in (1, 2):
        ended(engine, [n] * 10)
    assert caches() == [29, 29]
    assert ended(engine, [3] * 30).token_ids == result(lm, [3] * 30, LONG).token_ids
    assert caches() == [49]  # the others went, since they began first


def test_an_engine_gets_the_memory_that_another_engine_keeps(lm, caches, monkeypatch):
    monkeypatch.setattr(lm.backend, "memory_for_caches", lambda: 100 * lm.backend.slot_bytes)
    gc.collect()  # engines of other tests
    keeping, other = Engine(lm, max_kept_prefixes=3), Engine(lm)
    for n in (1, 2):
        ended(keeping, [n] * 20)
    assert caches() == [39, 39]
    assert len(ended(other, [3] * 60).token_ids) == 20
    assert caches() == []
    assert ended(keeping, [2] * 20).stats.reused_tokens == 0


def test_kept_caches_go_when_a_pass_finds_no_memory(lm, caches, monkeypatch):
    forward = lm.backend.forward

    def scarce(segments):
        if len(caches()) > 1:
            raise MemoryError("full")
        return forward(segments)

    engine = Engine(lm, max_kept_prefixes=1)
    ended(engine, [1] * 10)
    monkeypatch.setattr(lm.backend, "forward", scarce)
    request = engine.submit([2] * 10, LONG)
    engine.run()
    monkeypatch.undo()
    assert request.result().token_ids == result(lm, [2] * 10, LONG).token_ids


@given(share=st.floats(0, 1), beams=st.sampled_from([1, 2]))
def test_after_an_interrupt_at_any_line_kept_caches_are_right(lm, share, beams):
    options = {"max_new_tokens": 5, "num_beams": beams}
    prompts = [[4, 5, 6] * 3, [4, 5, 6] * 4, [4, 5, 6] * 4]

    def begin():
        engine = Engine(lm, max_kept_prefixes=1, max_batch_tokens=8)
        ended(engine, prompts[0], options)
        return engine, engine.submit(prompts[1], options)

    lines = run_until(begin()[0], None)
    engine, request = begin()
    run_until(engine, 1 + int(share * lines))
    request.cancel()
    again = ended(engine, prompts[2], options)
    assert request.done
    assert again.token_ids == result(lm, prompts[2], options).token_ids


@pytest.mark.parametrize("wrong", [-1, True, 1.5, None])
def test_a_wrong_number_of_kept_prefixes_is_refused(lm, wrong):
    with pytest.raises(SpecbeamError, match=f"max_kept_prefixes={wrong} is not allowed: give at least 0"):
        Engine(lm, max_kept_prefixes=wrong)
