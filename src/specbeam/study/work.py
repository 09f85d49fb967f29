"""The work of a worker: one generation at a time, on models that stay loaded."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from specbeam import plugins
from specbeam.api.scoring import score
from specbeam.drafting.resolve import resolve_draft
from specbeam.engine import Engine
from specbeam.errors import SpecbeamError
from specbeam.models.model import LanguageModel, load
from specbeam.models.prompts import encode, last_message, show_prompt, tokenize
from specbeam.options.options import Options
from specbeam.recording.events import LIKELIEST, Event, events, finite
from specbeam.study.config import Method, Study, check, methods
from specbeam.study.data import Row
from specbeam.study.results import Record

WARM_UP_TOKENS = 8
"""Length of each method's first generation, which is not kept: it allocates memory and times passes."""

KEPT_OF_TEXTS = ("text", "token_ids", "score", "log_prob", "is_complete")
"""The attributes of :class:`specbeam.Sequence` that are kept of each text."""

Job = dict[str, Any]
"""What is known of a record, and the "messages" that its text answers."""


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
        self._strategies: dict[str, Any] = {
            name: plugins.resolve(method.strategy, "strategy", from_here=True)
            for name, method in self.methods.items()
            if method.strategy is not None
        }
        for method in self.methods.values():
            self.models(method)

    def models(self, method: Method) -> tuple[LanguageModel, Any]:
        """The target and its draft: a draft model or head, "ngram", "suffix", a custom drafter or None."""
        target = self._model(self.study.target_model, method.load)

        def load(source: str) -> LanguageModel:
            return target.draft_head(source, method.draft_load.get("quantize")) or self._model(
                source, method.draft_load
            )

        return target, resolve_draft(method.draft, load, from_here=True)

    def _model(self, source: str, how: Mapping[str, Any]) -> LanguageModel:
        """A model, which is loaded once for each way to load it."""
        return self._load(source, **{name: value for name, value in how.items() if value is not None})

    def __call__(self, job: Job) -> Record:
        """The record of a job. It holds the error if the generation fails; only an interrupt is raised."""
        start = time.perf_counter()
        record = new_record(job)
        try:
            record |= self._generate(job)
        except Exception as error:  # the other generations go on
            kind = "" if isinstance(error, SpecbeamError) else f"{type(error).__name__}: "
            record["error"] = kind + " ".join(str(error).split())
        return record | {"wall": time.perf_counter() - start}

    def _generate(self, job: Job) -> Record:
        lm, draft = self.models(self.methods[job["method"]])
        prompt, how = self._asked(lm, job)
        using = self._using(job, draft)
        options = self._options(job)
        if job["method"] not in self._warm:
            few = options | {"max_new_tokens": min(WARM_UP_TOKENS, options["max_new_tokens"]), "min_new_tokens": 0}
            self._run(lm, prompt, few, **how, **using)
            self._warm.add(job["method"])
        result, times, tokens = self._run(lm, prompt, options, **how, **using)
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

    def recording(self, job: Job) -> list[Event]:
        """The events of a generation. It runs once more for them, so that the measured one has no further work."""
        lm, draft = self.models(self.methods[job["method"]])
        prompt, how = self._asked(lm, job)
        options = Options.of(self._options(job) | {"trace": True, "top_logprobs": LIKELIEST})
        result, *_ = self._run(lm, prompt, options, **how, **self._using(job, draft))
        name = draft.source if isinstance(draft, LanguageModel) else self.methods[job["method"]].draft
        message = last_message(lm, prompt, raw=how.get("raw", False))
        return [finite(event) for event in events(lm, encode(lm, prompt, **how), options, name, result, message)]

    def perplexity(self, name: str, job: Job) -> float | None:
        """The perplexity of a generation's text given its messages; None without tokens.

        It is e to the power of the mean negative log-probability of the text's tokens.

        Args:
            name: "target", loaded as for the method, or another model, which reads the text by its own tokenizer.
        """
        if name == "target":
            token_ids, log_prob = job["token_ids"], job["beams"][0]["log_prob"]
        else:
            lm = self._model(name, vars(self.study.load))
            prompt, how = self._asked(lm, job)
            token_ids = list(tokenize(lm.tokenizer, job["text"], add_special_tokens=False).input_ids)
            texts = [(encode(lm, prompt, **how), token_ids)] if token_ids else []
            log_prob = sum(log_prob for _, log_prob, _ in score(lm, texts))
        with np.errstate(over="ignore"):  # of a text that is next to impossible it is infinite
            return float(np.exp(-log_prob / len(token_ids))) if token_ids else None

    def _options(self, job: Job) -> dict[str, Any]:
        """The options of a generation. If it samples, its seed is the same for all methods, and on every machine."""
        options = self.methods[job["method"]].options
        if not options["do_sample"]:
            return options
        parts = (self.study.seed, job["row"], job["turn"], job["repeat"])
        return options | {"seed": int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")}

    def _asked(self, lm: LanguageModel, job: Job) -> tuple[Any, dict[str, Any]]:
        """The prompt of a job, and the options that say how to read it."""
        chat = self.study.chat
        if chat.raw or not lm.has_chat_template:
            return job["prompt"], {"raw": chat.raw}
        return job["messages"], {"system": chat.system_prompt if chat.use_system_prompt else None}

    def _using(self, job: Job, draft: Any) -> dict[str, Any]:
        """The draft and the strategy of a job's method."""
        return {"draft": draft, "strategy": self._strategies.get(job["method"])}

    def _run(self, lm: LanguageModel, prompt: Any, options: Any, **how: Any) -> tuple[Any, list[float], list[int]]:
        """A result, the seconds after which each piece of its text came, and the tokens of each piece."""
        engine = Engine(lm)
        start = time.perf_counter()
        request = engine.submit(prompt, options, **how)
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


def new_record(job: Job) -> Record:
    """The record of a job that has no text yet."""
    return {name: job[name] for name in job if name != "messages"} | {"started": time.time(), "error": None}


def jobs_of_turn(study: Study, rows: list[Row], turn: int, records: Mapping[str, Record]) -> list[Job]:
    """The jobs of a turn that are not done yet, all methods of a row one after the other.

    The first method changes from row to row, so that a machine that becomes slower favours none.
    """
    compared = methods(study)
    jobs = []
    for repeat, (number, row) in product(range(study.repeats), enumerate(rows)):
        if turn >= len(row.turns):
            continue
        first = (number + repeat) % len(compared)
        for method in [*compared[first:], *compared[:first]]:
            record = {
                "key": key_of(method.name, row.id, turn, repeat),
                "method": method.name,
                "turn": turn,
                "repeat": repeat,
                "mode": method.mode,
                "row": row.id,
                "category": row.category,
                "prompt": row.turns[turn],
                "references": row.references if turn == len(row.turns) - 1 else [],
                "problem": row.problem,
            }
            job = with_messages(record, records)
            if job["key"] not in records and len(job["messages"]) == 2 * turn + 1:  # no earlier turn failed
                jobs.append(job)
    return jobs


def with_messages(record: Record, records: Mapping[str, Record]) -> Job:
    """A record with the messages that it answers: the earlier turns that did not fail, answered, and its prompt."""
    keys = (key_of(record["method"], record["row"], turn, record["repeat"]) for turn in range(record["turn"]))
    messages = [
        {"role": role, "content": records[key][part]}
        for key in keys
        if key in records and records[key]["error"] is None
        for role, part in (("user", "prompt"), ("assistant", "text"))
    ]
    return record | {"messages": [*messages, {"role": "user", "content": record["prompt"]}]}


def key_of(method: str, row: str, turn: int, repeat: int) -> str:
    """The key of a generation."""
    return f"{method}|{row}|{turn}|{repeat}"
