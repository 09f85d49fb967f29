"""The work of a worker: one generation at a time, on models that stay loaded."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from specbeam.engine import Engine
from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel, load
from specbeam.option_names import LOOKUPS
from specbeam.options import Options
from specbeam.prompts import encode, show_prompt, tokenize
from specbeam.recording import LIKELIEST, Event, events, finite
from specbeam.scoring import score
from specbeam.study.config import Method, Study, check, methods
from specbeam.study.results import Record

WARM_UP_TOKENS = 8
"""Length of each method's first generation, which is not kept: it allocates memory and times passes."""

KEPT_OF_TEXTS = ("text", "token_ids", "score", "log_prob")
"""The attributes of :class:`specbeam.Sequence` that are kept of each text."""

Job = dict[str, Any]
"""A method's name and mode, a row, the turn and the repeat, the seed, and the messages so far."""


class Work:
    """Makes the record of each job.

    Args:
        config: the study's configuration, as plain data: workers may be other processes.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.study = check(config)
        self.methods = {method.name: method for method in methods(self.study)}
        self._load = cache(load)
        self._warm: set[str] = set()
        for method in self.methods.values():
            self.models(method)

    def models(self, method: Method) -> tuple[LanguageModel, Any]:
        """The target and its draft: a draft model, "ngram", "suffix" or None."""
        target = self._model(self.study.target_model, method.load)
        if method.draft is None or method.draft in LOOKUPS:
            return target, method.draft
        return target, self._model(method.draft, method.draft_load)

    def _model(self, source: str, how: Mapping[str, Any]) -> LanguageModel:
        """A model, which is loaded once for each way to load it."""
        return self._load(source, **{name: value for name, value in how.items() if value is not None})

    def __call__(self, job: Job) -> Record:
        """The record of a job. It holds the error if the generation fails; only an interrupt is raised."""
        start = time.perf_counter()
        record = begun(job)
        try:
            record |= self._generate(job)
        except Exception as error:  # the other generations go on
            kind = "" if isinstance(error, SpecbeamError) else f"{type(error).__name__}: "
            record["error"] = kind + " ".join(str(error).split())
        return record | {"wall": time.perf_counter() - start}

    def _generate(self, job: Job) -> Record:
        method = self.methods[job["method"]]
        lm, draft = self.models(method)
        prompt, how = self._asked(lm, job["messages"])
        options = self._options(method, job["seed"])
        if method.name not in self._warm:
            few = options | {"max_new_tokens": min(WARM_UP_TOKENS, options["max_new_tokens"]), "min_new_tokens": 0}
            self._run(lm, prompt, few, draft, how)
            self._warm.add(method.name)
        result, times, tokens = self._run(lm, prompt, options, draft, how)
        return {
            "rendered": show_prompt(lm, prompt, **how) if self.study.debug.render_input_text else None,
            "text": result.text,
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "beams": [{name: getattr(s, name) for name in KEPT_OF_TEXTS} for s in result.sequences],
            "stats": asdict(result.stats),
            "draft_precision": draft.precision if isinstance(draft, LanguageModel) else None,
            "times": times,
            "piece_tokens": tokens,
        }

    def recording(self, messages: list[dict[str, str]], record: Record) -> list[Event]:
        """The events of a generation. It runs once more for them, so that the measured one has no further work."""
        method = self.methods[record["method"]]
        lm, draft = self.models(method)
        prompt, how = self._asked(lm, messages)
        seed = seed_of(self.study, record["row"], record["turn"], record["repeat"])
        chosen = Options.of(self._options(method, seed) | {"trace": True, "top_logprobs": LIKELIEST})
        result, *_ = self._run(lm, prompt, chosen, draft, how)
        name = draft.source if isinstance(draft, LanguageModel) else draft
        return [finite(event) for event in events(lm, encode(lm, prompt, **how), chosen, name, result)]

    def perplexity(self, name: str, messages: list[dict[str, str]], record: Record) -> float | None:
        """The perplexity of a text given the messages that it answers; None without tokens.

        It is e to the power of the mean negative log-probability of the text's tokens.

        Args:
            name: "target", loaded as for the method, or another model, which reads the text by its own tokenizer.
        """
        if name == "target":
            token_ids, log_prob = record["token_ids"], record["beams"][0]["log_prob"]
        else:
            lm = self._model(name, vars(self.study.load))
            prompt, how = self._asked(lm, messages)
            token_ids = list(tokenize(lm.tokenizer, record["text"], add_special_tokens=False).input_ids)
            texts = [(encode(lm, prompt, **how), token_ids)] if token_ids else []
            log_prob = sum(log_prob for _, log_prob, _ in score(lm, texts))
        return math.exp(-log_prob / len(token_ids)) if token_ids else None

    def _options(self, method: Method, seed: int) -> dict[str, Any]:
        """The options of one of a method's generations. The seed is for methods that sample."""
        return method.options | ({"seed": seed} if method.options["do_sample"] else {})

    def _asked(self, lm: LanguageModel, messages: list[dict[str, str]]) -> tuple[Any, dict[str, Any]]:
        """The prompt for some messages, and the options that say how to read it."""
        chat = self.study.chat
        if chat.raw or lm.tokenizer is None or not lm.tokenizer.chat_template:
            return messages[-1]["content"], {"raw": chat.raw}
        return messages, {"system": chat.system_prompt if chat.use_system_prompt else None}

    def _run(
        self, lm: LanguageModel, prompt: Any, options: Any, draft: Any, how: Any
    ) -> tuple[Any, list[float], list[int]]:
        """A result, the seconds after which each piece of its text came, and the tokens of each piece."""
        engine = Engine(lm)
        start = time.perf_counter()
        request = engine.submit(prompt, options, draft=draft, **how)
        pieces, more = request.pieces, True
        times: list[float] = []
        tokens: list[int] = []
        waiting = 0  # tokens whose text has not come
        while more:
            more = engine.step()
            waiting += sum(len(piece.token_ids) for piece in pieces)
            if waiting and any(piece.text for piece in pieces):
                times.append(time.perf_counter() - start)
                tokens.append(waiting)
                waiting = 0
            pieces.clear()
        return request.result(), times, tokens


def begun(job: Job) -> Record:
    """The part of a job's record that is known before there is a text."""
    row = job["row"]
    return {
        **{name: job[name] for name in ("key", "method", "turn", "repeat", "mode")},
        "row": row["id"],
        "category": row["category"],
        "prompt": job["messages"][-1]["content"],
        "references": row["references"] if job["turn"] == len(row["turns"]) - 1 else [],
        "problem": row["problem"],
        "started": time.time(),
        "error": None,
    }


def jobs_of_turn(study: Study, rows: list[Any], turn: int, records: Mapping[str, Record]) -> list[Job]:
    """The jobs of a turn that are not done yet, all methods of a row one after the other.

    The first method changes from row to row, so that a machine that becomes slower favours none.
    """
    compared = methods(study)
    found = []
    for repeat in range(study.repeats):
        for number, row in enumerate(rows):
            if turn >= len(row.turns):
                continue
            first = (number + repeat) % len(compared)
            for method in [*compared[first:], *compared[:first]]:
                key = key_of(method.name, row.id, turn, repeat)
                said = said_before(records, method.name, row.id, turn, repeat)
                if key in records or len(said) < 2 * turn:  # it is done, or an earlier turn failed
                    continue
                job = {"key": key, "method": method.name, "mode": method.mode, "row": vars(row), "turn": turn}
                job |= {"repeat": repeat, "seed": seed_of(study, row.id, turn, repeat)}
                found.append(job | {"messages": [*said, {"role": "user", "content": row.turns[turn]}]})
    return found


def said_before(records: Mapping[str, Record], method: str, row: str, turn: int, repeat: int) -> list[dict[str, str]]:
    """The messages before a turn: the prompts of earlier turns and their answers, without turns that failed."""
    earlier = (records.get(key_of(method, row, number, repeat)) for number in range(turn))
    return [
        {"role": role, "content": record[part]}
        for record in earlier
        if record is not None and record["error"] is None
        for role, part in (("user", "prompt"), ("assistant", "text"))
    ]


def key_of(method: str, row: str, turn: int, repeat: int) -> str:
    """The key of a generation."""
    return f"{method}|{row}|{turn}|{repeat}"


def seed_of(study: Study, row: str, turn: int, repeat: int) -> int:
    """The seed of a prompt's generations: the same for all methods, and on every machine."""
    parts = (study.seed, row, turn, repeat)
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")
