"""One generator of cases: model x options x draft x policy x batch x chunking x preemption, each drawn from a seed.

A case is plain data, so that a file can hold it: its model, the limits of one engine, and the requests in it.
:func:`draw_case` makes it, :func:`run_case` returns what the engine gives back for it.

Both use public names of specbeam only, apart from a preemption: an older version runs the same cases. Only
:func:`write_models` uses the helpers of the tests, which fit the version beside them.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import specbeam
from specbeam import Engine, LanguageModel, SpecbeamError
from specbeam.engine import CostTable

# Models.

EOS, BOS = 1, 0
LARGEST = 259
"""The vocabulary of GGUF files, with all bytes and the special tokens of the byte tokenizer."""
FOLDERS = {
    "llama": ("llama", 200),
    "llama, 8 tokens": ("llama", 8),
    "llama, confident": ("llama", 61),  # it repeats itself: few beams matter, and lookups are accepted
    "llama, ties": ("llama", 61),
    "llama, spellings": ("llama", 6),  # a text has several, so distinct texts matter
    "llama, spellings and ties": ("llama", 6),
    "qwen2, some layers sliding": ("qwen2, some layers sliding", 20),
    "qwen2, ties": ("qwen2", 200),
    "qwen3": ("qwen3", 61),
    "mistral, sliding window": ("mistral, sliding window", 200),
    "mistral, confident": ("mistral, sliding window", 20),
    "gpt2": ("gpt2", 20),
    "gpt_neox": ("gpt_neox", 61),
    "stablelm, parallel": ("stablelm, parallel", 8),
    "phi3": ("phi3", 200),
    "smollm3": ("smollm3", 61),
    "gemma2": ("gemma2", 20),
    "gemma3": ("gemma3", 61),
    "gemma4": ("gemma4", 61),
    "olmo2": ("olmo2", 20),
    "olmo3": ("olmo3", 61),
    "hunyuan": ("hunyuan", 61),
    "granite": ("granite", 20),
    "glm4": ("glm4", 61),
    "exaone4": ("exaone4", 20),
    "lfm2": ("lfm2", 61),
    "qwen3_5": ("qwen3_5", 61),
    "qwen3_5, confident": ("qwen3_5, linear attention first and last", 20),
    "granitemoehybrid": ("granitemoehybrid", 61),
    "falcon_h1": ("falcon_h1", 61),
    "nemotron_h": ("nemotron_h", 20),
    "qwen3_moe": ("qwen3_moe", 61),
    "gpt_oss": ("gpt_oss", 20),
    "lfm2, confident": ("lfm2, convolutions first and last", 20),
    "granitemoehybrid, confident": ("granitemoehybrid", 20),
}
"""Names of targets, with their families (tests/backends/test_conformance.py) and sizes of the vocabulary."""
FILES = {
    "llama, Q8_0": ("llama", "Q8_0"),
    "llama, Q4_0": ("llama", "Q4_0"),
    "qwen2, Q4_1": ("qwen2", "Q4_1"),
    "qwen3, Q5_0": ("qwen3", "Q5_0"),
    "gemma3, Q5_1": ("gemma3", "Q5_1"),
    "gpt2, F16": ("gpt2", "F16"),
    "lfm2, Q4_0": ("lfm2", "Q4_0"),
    "qwen3_5, Q4_0": ("qwen3_5", "Q4_0"),
    "falcon_h1, Q4_0": ("falcon_h1", "Q4_0"),
    "olmo2, Q8_0": ("olmo2", "Q8_0"),
    "gemma4, Q8_0": ("gemma4", "Q8_0"),
    "hunyuan, Q4_0": ("hunyuan_v1_dense", "Q4_0"),
}
"""The same for GGUF files, with the types of their weights."""
WITH_STATES = ("lfm2", "qwen3_5", "granitemoehybrid", "falcon_h1", "nemotron_h")
"""Beginnings of the names of models that keep a state in place of keys and values."""
CONFIDENT = tuple(name for name in FOLDERS if name.endswith("confident"))
FORMATS = ("float32", "float32", "float32", "int8", "int8", "int4", "torch", "transformers")
"""How folders are loaded: in one of three precisions on the cpu backend, or in float32 on another."""
VOCABULARIES = sorted({size for _, size in FOLDERS.values()} | {LARGEST})


def write_models(folder: Path) -> None:
    """Write all models, targets and drafts, to an empty folder."""
    from gguf import GGMLQuantizationType

    from tests.backends.test_conformance import FAMILIES
    from tests.checkpoints.test_gguf import write_gguf
    from tests.conftest import byte_tokenizer, head_of, random_model
    from tests.decoding.test_distinct import ENDS, spelling_tokenizer
    from tests.decoding.test_speculative import other_tokenizer

    def save(name: str, model: Any, tokenizer: Any = None) -> None:
        model.save_pretrained(folder / name)
        (tokenizer or byte_tokenizer(vocab_size=model.config.vocab_size)).save_pretrained(folder / name)

    def sizes(vocabulary: int, **changes: Any) -> dict[str, Any]:
        ends = {"eos_token_id": EOS, "bos_token_id": BOS, "pad_token_id": EOS}
        return {"vocab_size": vocabulary, "num_hidden_layers": 2, **ends, **changes}

    for name, (family, vocabulary) in FOLDERS.items():
        architecture, changes = FAMILIES[family]
        spread = {"initializer_range": 0.1} if name.endswith("confident") else {}
        spells = "spellings" in name
        spread |= {"eos_token_id": ENDS, "pad_token_id": ENDS[0]} if spells else {}
        model = random_model(architecture, seed=zlib.crc32(name.encode()), **sizes(vocabulary, **changes, **spread))
        rows = head_of(model)
        if name.endswith("confident"):
            rows *= 40
        if name.endswith("ties"):  # few different rows, so the logits of many tokens are equal
            rows[:] = rows[np.arange(len(rows)) % min(7, len(rows) // 2)]
        save(name, model, spelling_tokenizer() if spells else None)
    for name, (architecture, kind) in FILES.items():
        model = random_model(architecture, seed=len(name), intermediate_size=64, num_hidden_layers=2)
        write_gguf(folder / f"{name}.gguf", model, GGMLQuantizationType[kind])
    for vocabulary in VOCABULARIES:
        save(f"sibling of {vocabulary}", random_model("llama", seed=3, **sizes(vocabulary, num_hidden_layers=1)))
    save("other vocabulary", random_model("llama", seed=7, num_hidden_layers=1), other_tokenizer())


class Models:
    """The models that :func:`write_models` wrote, each loaded when it is first used, with one thread.

    Args:
        real: a model of real weights, for the cases that :func:`draw_real_case` draws.
    """

    def __init__(self, folder: Path, real: Path | None = None) -> None:
        self.folder, self.real = folder, real
        self._made: dict[Any, Any] = {}

    def load(self, name: str, how: str) -> LanguageModel:
        """A model by its name and, for a folder, one of ``FORMATS``."""
        if (name, how) not in self._made:
            keywords: dict[str, Any] = {"backend": "cpu", "threads": 1}
            if how in ("torch", "transformers"):
                keywords = {"backend": how, "device": "cpu", "dtype": "float32"}
            elif how:
                keywords["quantize"] = how
            source = self.real if name == "real" else self.folder / name
            assert source is not None
            self._made[name, how] = specbeam.load(source, **keywords)
        lm: LanguageModel = self._made[name, how]
        return lm

    def draft(self, case: dict[str, Any], name: str | None) -> Any:
        """The draft of a request, by its name in the case."""
        lm = self.load(case["model"], case["format"])
        if name == "itself":
            return lm
        if name == "automaton":
            if case["model"] == "real":
                return specbeam.suffix_automaton(lm, [one["prompt"] for one in case["requests"]])
            key = case["model"], case["format"], name
            if key not in self._made:
                text = [token % lm.backend.vocab_size for token in (*range(2, 40), *range(2, 200, 3)) for _ in (0, 1)]
                self._made[key] = specbeam.suffix_automaton(lm, [text, text[::-1]])
            return self._made[key]
        if name is None or name in ("ngram", "suffix"):
            return name
        return self.load(name, case["format"] or "int8")


class Walk:
    """A user-defined constraint: an automaton whose states count, with some tokens missing in each state."""

    start = 0

    def __init__(self, vocab_size: int, period: int) -> None:
        self.vocab_size, self.period = vocab_size, period

    def _may_follow(self, state: int, tokens: Any) -> Any:
        return (state + tokens) % self.period != 0

    def advance(self, state: int, token: int) -> int | None:
        return (3 * state + token) % 11 if self._may_follow(state, token) else None

    def mask(self, state: int, vocab_size: int) -> Any:
        tokens = np.arange(vocab_size)
        return np.packbits(self._may_follow(state, tokens) & (tokens < self.vocab_size), bitorder="little")

    def complete(self, state: int) -> bool:
        return state % 2 == 0


# Drawing.


def draw_case(seed: int, index: int) -> dict[str, Any]:
    """The case with this number, for a seed."""
    draw = random.Random(f"{seed} {index}")
    if draw.random() < 0.8:
        model, how = draw.choice([*FOLDERS, *CONFIDENT, *CONFIDENT]), draw.choice(FORMATS)
        vocabulary = FOLDERS[model][1]
        if "ties" in model and how in ("torch", "transformers"):
            how = "float32"  # there a batch changes the last bits, and so the order of ties
        if model.startswith(WITH_STATES) and how == "transformers":
            how = "float32"  # that backend refuses them
    else:
        model, how, vocabulary = draw.choice([*FILES]) + ".gguf", "", LARGEST
    beginning = _tokens(draw, vocabulary, draw.choice((1, 12, 60)))
    requests = [_draw_request(draw, vocabulary, how, beginning) for _ in range(draw.choice((1, 1, 1, 2, 3, 4, 5, 6)))]
    if draw.random() < 0.2:  # the second finds the prefixes of the first
        requests.insert(0, requests[0])
    for number, one in enumerate(requests[1:], 1):
        if draw.random() < 0.2:  # a turn of a conversation, perhaps with its last tokens taken back
            one = requests[number] = one | {"goes_on": [draw.randrange(number), draw.choice((0, 0, 1, 4, 15))]}
        if draw.random() < 0.1:  # after its rounds, a pass of the target fails
            requests[number] = one | {"fails": draw.choice(("interrupt", "error", "not finite"))}
    full = max(len(one["prompt"]) + one["options"]["max_new_tokens"] for one in requests)
    # One sequence of full length has to fit. With little more, requests are preempted, and beams take turns.
    tight = (full, full + 2, full + 7, full + 40, full * 2 // 3 + 1)
    return {
        "seed": f"{seed} {index}",
        "model": model,
        "format": how,
        "limits": {
            "max_requests": draw.choice((1, 2, 4, 8, 8)),
            "max_batch_tokens": draw.choice((1, 5, 16, 512)),
            "max_cache_tokens": draw.choice(tight) if draw.random() < 0.2 + 0.1 * len(requests) else None,
            "max_pass_seconds": draw.choice((None, None, 0.0)),
        },
        "costs": draw.choice((None, [1e-3, 1e-3], [1e-3, 1e-3], [1e-3, 1e-6], [1e-3, 3e-5, draw.randrange(1000)])),
        "preempts": draw.random() < 0.1,  # after each iteration, the newest request loses its cache
        "requests": requests,
    }


def draw_real_case(seed: int, index: int, texts: list[str]) -> dict[str, Any]:
    """A case of one or two requests to a model of real weights."""
    draw = random.Random(f"{seed} {index} real")
    requests = []
    for _ in range(draw.choice((1, 1, 2))):
        kind = draw.choice(("greedy", "sample", "beams"))
        options: dict[str, Any] = {"max_new_tokens": 32}
        if kind == "sample":
            options |= {"temperature": draw.choice((0.7, 1.0)), "top_p": 0.9, "seed": draw.randrange(1000)}
        if kind == "beams":
            options |= {"num_beams": 4, "num_return_sequences": draw.choice((1, 4))}
        draft = draw.choice((None, "ngram", "suffix", "automaton"))
        requests.append({"kind": kind, "prompt": draw.choice(texts), "options": options, "draft": draft, "rounds": 0})
    limits = {"max_requests": 2, "max_batch_tokens": draw.choice((64, 512))}
    return {
        "seed": f"{seed} {index}",
        "model": "real",
        "format": "",
        "limits": limits,
        "costs": None,
        "requests": requests,
    }


def _tokens(draw: random.Random, vocabulary: int, length: int) -> list[int]:
    """Token ids, which half of the time repeat themselves, so that lookups find something."""
    period = draw.choice((2, 5, length, length))
    tokens = [draw.randrange(2, min(vocabulary, 256)) for _ in range(min(period, length))]
    return (tokens * length)[:length]


def _draw_request(draw: random.Random, vocabulary: int, how: str, beginning: list[int]) -> dict[str, Any]:
    kind = draw.choice(
        ("greedy", "greedy", "sample", "sample", "samples", "beams", "beams", "beams", "drawn", "groups")
    )
    options = draw_options(draw, vocabulary, kind)
    drafts = [None, None, "ngram", "suffix", "automaton", f"sibling of {vocabulary}", "itself", "other vocabulary"]
    draft = None if kind == "samples" else draw.choice(drafts)
    if draft is not None and (draw.random() < 0.3 or how in ("torch", "transformers")):
        options |= {"num_draft_tokens": draw.choice((1, 2, 5)), "draft_width": draw.choice((1, 2, 4))}
        options |= draw.choice(({}, {"draft_budget": 6}))
    if draft in (f"sibling of {vocabulary}", "itself") and kind in ("sample", "drawn") and draw.random() < 0.3:
        options |= draw.choice(({"draft_temperature": 0.5}, {"draft_top_k": 4}))
    if draw.random() < 0.5:
        prompt = beginning[: draw.choice((len(beginning), len(beginning) // 2 + 1))]
        prompt = prompt + _tokens(draw, vocabulary, draw.randrange(5) + 1)
    else:
        prompt = _tokens(draw, vocabulary, draw.choice((1, 2, 8, 30)))
    request = {"kind": kind, "prompt": prompt, "options": options, "draft": draft}
    kinds = (None, None, None, None, "trie", "trie", "walk", "walk", "few", "prefix", "processor")
    if limit := draw.choice(kinds):
        request["limit"] = _draw_limit(draw, vocabulary, limit)
    request["rounds"] = draw.choice((0, 0, 1, 4, 40))  # iterations of the engine, before the next request comes
    if draw.random() < 0.1:
        request["cancel"] = draw.choice((0, 1, 2, 3, 6))  # after this many further iterations
    elif draw.random() < 0.02:
        request["timeout"] = 0
    if draw.random() < 0.2:
        request["priority"] = draw.randrange(-1, 2)
    if draw.random() < 0.3:
        request["read"] = True  # its pieces are taken as they come
    return request


def draw_options(draw: random.Random, vocabulary: int, kind: str) -> dict[str, Any]:
    """Options that go together, for one kind of request.

    Args:
        kind: "greedy", "sample", "samples" (several), "beams", "drawn" (beams that are drawn) or "groups" (of beams).
    """

    def some(most: int) -> list[int]:
        return sorted(draw.sample(range(vocabulary), draw.randint(1, most)))

    options: dict[str, Any] = {"max_new_tokens": draw.choice((1, 2, 5, 9, 14, 24, 40))}
    if kind in ("sample", "samples", "drawn"):
        options |= {"do_sample": True, "seed": draw.randrange(10**6)}
        options |= draw.choice(({}, {"temperature": 0.6}, {"temperature": 2.5}))
        options |= draw.choice(({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.7}))
        options |= draw.choice(({}, {}, {"top_k": 3, "top_p": 0.9}))
    if kind == "samples":
        options["num_return_sequences"] = draw.randint(2, 4)
    if kind in ("beams", "drawn", "groups"):
        beams = draw.choice((2, 4, 6, 16) if kind == "groups" else (2, 3, 4, 5, 8, 17))
        options |= {"num_beams": beams, "num_return_sequences": draw.choice((1, 2, beams))}
        options["length_penalty"] = draw.choice((1.0, 1.0, 0.0, 2.0, -1.0, 0.6))
        options["early_stopping"] = draw.choice((False, False, True, "never"))
        options |= draw.choice(({}, {}, {"distinct": True}, {"bound_rule": False}))
    if kind == "groups":
        options |= {"num_beam_groups": 2, "diversity_penalty": draw.choice((0.5, 3.0))}
    changes: list[dict[str, Any]] = [
        {"eos_token_id": some(min(6, vocabulary - 2))},
        {"eos_token_id": some(min(6, vocabulary - 2))},
        {"min_new_tokens": draw.randint(0, options["max_new_tokens"])},
        {"repetition_penalty": draw.choice((0.8, 1.2, 1.6))},
        {"no_repeat_ngram_size": draw.randint(2, 4)},
        {"frequency_penalty": draw.uniform(-1, 2), "presence_penalty": draw.choice((0.0, 0.7))},
        {"bad_words_ids": [some(2) for _ in range(draw.randint(1, 4))]},
        {"logit_bias": {str(token): draw.choice((-3.0, 1.5, float("-inf"))) for token in some(4)}},
        {"stop_strings": [chr(33 + draw.randrange(min(vocabulary, 90))) for _ in range(2)]},
        {"top_logprobs": draw.randint(0, 3)},
        {"share_prefix": False},
        {"trace": True},
    ]
    for change in draw.sample(changes, draw.choice((0, 1, 1, 2, 2, 3, 4))):
        options |= change
    return options


def _draw_limit(draw: random.Random, vocabulary: int, kind: str) -> dict[str, Any]:
    """A limit of the texts, as data. See :func:`_limits`."""
    if kind == "trie":
        ids = range(2, vocabulary)
        return {"trie": [[draw.choice(ids) for _ in range(draw.randint(1, 6))] for _ in range(draw.choice((3, 30)))]}
    if kind == "walk":
        return {"walk": draw.randint(2, 5)}
    if kind == "few":
        return {"few": draw.choice((1, 1, 2, 3))}
    if kind == "prefix":
        return {"prefix": sorted(draw.sample(range(vocabulary), max(2, vocabulary // 3)))}
    return {"processor": draw.randrange(vocabulary)}


# Running.


def run_case(
    case: dict[str, Any],
    models: Models,
    seen: Counter[str] | None = None,
    stepped: Callable[[Engine], object] = lambda engine: None,
    ended: Callable[[Engine], object] = lambda engine: None,
) -> list[dict[str, Any]]:
    """The outcome of each request of a case: data that no batch, draft or measured time may change.

    A request that is cancelled after some iterations has no entry of its own: how far it came depends on measured
    times. Requests that came before a pass that failed are marked as broken, since times decide which it ended. On
    backends other than cpu the batch changes the last bits of scores, so there only token ids count.

    Args:
        seen: counts what happened: preemptions, cancels, reused tokens and so on.
        stepped: called with the engine after each iteration.
        ended: called with the engine once all requests have ended.
    """
    seen = Counter() if seen is None else seen
    lm = models.load(case["model"], case["format"])
    try:
        drafts = [models.draft(case, one["draft"]) for one in case["requests"]]
        engine = Engine(lm, costs=_costs(lm, case["costs"]), **case["limits"])
    except SpecbeamError as error:
        return [_refusal(error, models)]
    run = _Run(engine, seen, case.get("preempts", False), stepped)
    outcomes: list[Any] = []
    for number, (one, draft) in enumerate(zip(case["requests"], drafts, strict=True)):
        if "goes_on" in one:
            run.iterate(None)
            outcomes = [other if isinstance(other, dict) else run.outcome(other, models) for other in outcomes]
        given = {name: one[name] for name in ("priority", "timeout") if name in one}
        try:
            options = one["options"] | _limits(one.get("limit", {}), lm.backend.vocab_size)
            request = engine.submit(prompt_of(case, number, outcomes), options, draft=draft, **given)
        except SpecbeamError as error:
            outcomes.append(_refusal(error, models))
            continue
        outcomes.append(request)
        run.add(request, one)
        run.iterate(one["rounds"])
        if "fails" in one:
            run.fail(one["fails"])
    run.iterate(None)
    if engine.cache_tokens:
        outcomes.append({"held": engine.cache_tokens})
    ended(engine)
    return [one if isinstance(one, dict) else run.outcome(one, models) for one in outcomes]


def prompt_of(case: dict[str, Any], number: int, outcomes: list[dict[str, Any]]) -> list[int]:
    """The prompt of a request, which may go on from the text of an earlier one."""
    one = case["requests"][number]
    prompt: list[int] = one["prompt"]
    if "goes_on" not in one:
        return prompt
    earlier, taken_back = one["goes_on"]
    before = prompt_of(case, earlier, outcomes)
    if "sequences" in outcomes[earlier] and "broken" not in outcomes[earlier]:
        before = before + outcomes[earlier]["sequences"][0]["ids"]
    return before[: max(0, len(before) - taken_back)] + prompt


class _Run:
    """The requests of one engine: steps it, cancels them, and takes the pieces of requests that are read."""

    def __init__(self, engine: Engine, seen: Counter[str], preempts: bool, stepped: Callable[[Engine], object]) -> None:
        self.engine, self.seen, self.preempts, self.stepped = engine, seen, preempts, stepped
        self.broken: set[Any] = set()
        self.described: dict[Any, dict[str, Any]] = {}
        self.ages: Counter[Any] = Counter()
        self.pieces: dict[Any, list[Any]] = {}
        self.slots: Counter[Any] = Counter()

    def add(self, request: Any, described: dict[str, Any]) -> None:
        self.described[request] = described
        if described.get("read"):
            self.pieces[request] = []
        self._look()

    def iterate(self, count: int | None) -> None:
        """Step the engine this often, or until no request is left."""
        while count is None or count > 0:
            more = self.engine.step()
            self.stepped(self.engine)
            if self.preempts:
                self.engine._scheduler.preempt_newest()
            self.ages.update(request for request in self.described if not request.done)
            self._look()
            if not more:
                return
            count = None if count is None else count - 1

    def fail(self, how: str) -> None:
        """Let the next pass of the target fail. Only after an interrupt its requests go on."""
        backend = self.engine.lm.backend
        forward = backend.forward

        def broken(segments: Any) -> Any:
            if how == "not finite":
                return forward(segments) * np.nan
            raise KeyboardInterrupt if how == "interrupt" else RuntimeError("broken")

        with mock.patch.object(backend, "forward", broken):
            try:
                self.iterate(1)
            except KeyboardInterrupt:
                self.seen["interrupts"] += 1
        self.broken |= set() if how == "interrupt" else {*self.described}

    def _look(self) -> None:
        for request, described in self.described.items():
            if not request.done and described.get("cancel") == self.ages[request]:
                request.cancel()
            if request in self.pieces:
                while request.pieces:
                    self.pieces[request].append(request.pieces.popleft())
            if self.slots[request] and not request.done and not request.used_slots:
                self.seen["preemptions"] += 1
            self.slots[request] = request.used_slots

    def outcome(self, request: Any, models: Models) -> dict[str, Any]:
        described = self.described[request]
        try:
            result = request.result()
        except Exception as error:
            self.seen["broken"] += request in self.broken
            return {"broken": True} if request in self.broken else _refusal(error, models)
        exact = self.engine.lm.backend.name == "cpu"
        self.seen["reused prefixes"] += result.stats.reused_tokens > 0
        self.seen["accepted drafts"] += result.stats.accepted > 0
        self.seen["beams left out"] += (result.stats.evaluated_beams or 1) < 1
        self.seen[f"ended by {result.finish_reason}"] += 1
        if described.get("cancel") and result.finish_reason == "cancelled":
            self.seen["cancelled in the middle"] += 1
        if described.get("cancel"):
            return {"cancelled": True}
        sequences = []
        for sequence in result.sequences:
            one = {"ids": sequence.token_ids, "text": sequence.text, "reason": sequence.finish_reason}
            if exact:
                one |= {"score": sequence.score.hex(), "log_prob": sequence.log_prob.hex()}
                if sequence.top_logprobs is not None:
                    tops = [[[token, value.hex()] for token, value in top.items()] for top in sequence.top_logprobs]
                    one["top_logprobs"] = tops
            sequences.append(one)
        found: dict[str, Any] = {"sequences": sequences} | ({"broken": True} if request in self.broken else {})
        if request in self.pieces:  # they are the text, so they add nothing
            best, pieces = result.sequences[0], self.pieces[request]
            read = [pair for one in pieces for pair in zip(one.token_ids, one.log_probs, strict=True)]
            text = "".join(one.text for one in pieces)
            if (text, read) != (best.text, [*zip(best.token_ids, best.log_probs, strict=True)]):
                found["streamed"] = [[one.text, one.token_ids] for one in pieces]
        return found


def _refusal(error: Exception, models: Models) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": str(error).replace(str(models.folder), "MODELS")}


def _limits(limit: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Options of a limit that :func:`_draw_limit` described."""
    if outputs := limit.get("trie"):
        return {"constraint": specbeam.TokenTrie(outputs)}
    if period := limit.get("walk"):
        return {"constraint": Walk(vocabulary, period)}
    if allowed := limit.get("prefix"):
        return {"prefix_allowed_tokens_fn": lambda _, ids: allowed if len(ids) % 2 else [*range(vocabulary)]}
    if count := limit.get("few"):  # fewer tokens than beams may follow
        few = range(1, count + 1)
        return {"prefix_allowed_tokens_fn": lambda _, ids: [(7 * int(ids[-1]) + n) % vocabulary for n in few]}
    if (token := limit.get("processor")) is not None:

        def lower(ids: Any, scores: Any) -> Any:
            changed = scores + 0.0
            changed[:, token] -= 2.0
            return changed

        return {"logits_processor": lower}
    return {}


def _costs(lm: LanguageModel, costs: list[float] | None) -> Any:
    """The costs that an engine expects of a pass and of a node, or None: it measures them. Drafts cost a tenth.

    On tiny models every pass costs about the same, so no beam would be deferred with measured costs. With a third
    number, the seed of a clock that says anything.
    """
    if costs is None:
        return None
    a_pass, a_node, *seed = costs
    draw = random.Random(seed[0]) if seed else None

    def seconds(nodes: int) -> float:
        if draw is None:
            return a_pass + a_node * nodes
        return (a_pass + a_node * nodes * draw.choice((0, 1, 30))) * draw.lognormvariate(0, 1)

    target, draft = CostTable(seconds), CostTable(lambda nodes: seconds(nodes) / 10)
    return lambda backend, ahead=False: target if backend is lm.backend else draft
