"""The model "specbeam" of lm_eval, EleutherAI's evaluation harness.

Importing this module registers it. ``python -m specbeam.lm_eval`` is the harness's own command line with it registered.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from specbeam.api.scoring import score
from specbeam.drafting.resolve import resolve_draft
from specbeam.engine import Engine
from specbeam.engine.drafts import check_draft
from specbeam.errors import BAD_INPUT, SpecbeamError, not_allowed
from specbeam.models.model import LanguageModel, load
from specbeam.models.prompts import apply_chat_template, first_token
from specbeam.options.declared import OPTIONS, SHAPING
from specbeam.options.options import Options, check_names

logger = logging.getLogger("lm_eval.models.specbeam")  # below the logger that the harness sets up

# Names of arguments. An unknown name is refused with the nearest of these, or of the options.
LOADING = ("pretrained", "backend", "device", "dtype", "quantize", "threads", "revision")
ARGUMENTS = (*LOADING, "draft", "max_length", "batch_size")
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks use for the most tokens to generate. The first one counts, as for the harness's own models."""


@register_model("specbeam")
class SpecbeamLM(TemplateLM):  # type: ignore[misc]  # lm_eval is untyped
    """Answers the harness's requests with a model of specbeam.

    Tasks see the same tokens as with the harness's own model "hf" without padding; a context that is too long is cut
    on the left. Decoding options (beams, drafts, penalties) affect tasks that generate, not tasks that score given
    texts.

    Args:
        pretrained: a source for :func:`specbeam.load`, or a loaded model, for which the arguments below do nothing.
        backend, device, dtype, quantize, threads, revision: as for :func:`specbeam.load`. All but the revision apply
            to the draft model too.
        draft: the source of a draft model, or a draft for :meth:`specbeam.Engine.submit`, such as "ngram".
        max_length: the maximum number of tokens of prompt and text together; None: the model's context.
        batch_size: requests that share a pass. "auto" is max_batch_size, or 8 if that is not given.
        max_batch_size: see batch_size.
        trust_remote_code: has no effect. The harness passes it for data sets; a checkpoint's code is never run.
        options: fields of :class:`specbeam.Options`. They override a task's generation_kwargs, with two exceptions:
            stop_strings are added to the task's, and the requests of a task get the seeds ``seed``, ``seed + 1``, ...

    Raises:
        SpecbeamError: an unknown argument, a value that is not allowed, or a model that cannot be loaded.
    """

    def __init__(
        self,
        pretrained: Any = None,
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        quantize: str = "auto",
        threads: int | None = None,
        revision: str | None = None,
        draft: Any = None,
        max_length: int | None = None,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        check_names(options, [*ARGUMENTS, *OPTIONS], "model argument")
        if pretrained is None:
            raise SpecbeamError("no model is named: give the model argument pretrained=SOURCE")
        self._seed = Options.of(seed=options.pop("seed", None), do_sample=True).seed  # for the tasks that sample
        self._given = options
        self._options = Options.of(options)
        self._options.check_drafting(draft is not None)
        self.batch_size = _batch_size(batch_size, max_batch_size)

        how: dict[str, Any] = {"backend": backend, "device": device, "dtype": dtype}
        how |= {"quantize": quantize, "threads": threads}
        if not isinstance(pretrained, LanguageModel):  # str: the harness turns names like 7 into numbers
            pretrained = load(str(pretrained), revision=None if revision is None else str(revision), **how)
        if isinstance(draft, str):
            lm = pretrained
            draft = resolve_draft(draft, lambda source: lm.draft_head(source) or load(source, **how))
        check_draft(pretrained, draft, self._options)
        self.lm, self.draft, self.tokenizer = pretrained, draft, pretrained.tokenizer
        self._device = torch.device(self.lm.backend.device)
        if self.tokenizer is None:
            raise SpecbeamError(f"{self.lm.source} has no tokenizer, and tasks are text: load the model with one")
        context = self.lm.backend.context_length
        self.max_length = context if max_length is None else max_length
        if not isinstance(self.max_length, int) or not 2 <= self.max_length <= context:
            raise not_allowed("max_length", max_length, f"2 to {context}, the model's context")
        self._greedy = self._options.do_sample is False or self._options.temperature == 0
        eos = self.tokenizer.eos_token_id
        has_eos = eos is not None and eos < self.lm.backend.vocab_size
        self._eos_token_ids = self.lm.eos_token_ids | ({eos} if has_eos else set())

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> SpecbeamLM:
        """The model that model_args describe; they win over the harness's own --device and --batch_size."""
        more = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if more.get("device") == "cuda:0":  # the harness's default; "auto" finds that GPU if there is one
            del more["device"]
        return cls(**{**more, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> SpecbeamLM:
        """The same from "name=value,name=value"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> Any:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one: BOS, or EOS where there is no BOS."""
        return first_token(self.lm)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text. By default, special tokens are added if the text does not begin with BOS."""
        if add_special_tokens is None:  # as HFLM does: chat templates write BOS out
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        ids: list[int] = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False).input_ids
        return ids

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness caches requests."""
        return self.lm.source.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of messages. Without a generation prompt, the last message is to be continued.

        Raises:
            SpecbeamError: the model has no chat template, or it refuses the messages, even without the system's.
        """
        if not self.lm.has_chat_template:
            raise SpecbeamError(f"{self.lm.source} has no chat template: leave out --apply_chat_template")
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        refused = None
        for messages in (chat_history, [message for message in chat_history if message["role"] != "system"]):
            try:
                return apply_chat_template(self.tokenizer, messages, **how)
            except SpecbeamError as error:  # some know no system role: try without, as the harness does
                logger.warning("the chat template refuses messages of %s: %s", [m["role"] for m in messages], error)
                refused = error
        raise SpecbeamError(f"{self.lm.source}: {refused}")

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The log-likelihoods of continuations, and whether each is the greedy one, from token ids.

        Args:
            requests: for each, its arguments, which are the harness's key for caching the answer (None: no caching),
                and the token ids of context and continuation.
        """
        continuations = [continuation for *_, continuation in requests]
        if (longest := max(map(len, continuations), default=0)) > self.max_length:
            raise SpecbeamError(
                f"a text of {longest} tokens is to be scored in one piece, but {self.lm.source} sees {self.max_length}"
            )
        capacities = [self.max_length + 1 - len(continuation) for continuation in continuations]
        texts = list(zip(self._fitted([context for _, context, _ in requests], capacities), continuations, strict=True))
        answers = [(0.0, True)] * len(texts)
        with tqdm(total=len(texts), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for number, log_prob, greedy in score(self.lm, texts, max_contexts=self.batch_size):
                answers[number] = log_prob, greedy
                if (arguments := requests[number][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", arguments, answers[number])
                bar.update()
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probabilities of whole texts. A text longer than the model's context is scored in windows."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (log_prob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[number] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each request's context, without the stop string that ended it."""
        options = [self._options_for(request.args[1], number) for number, request in enumerate(requests)]
        if (max_new_tokens := max((o.max_new_tokens for o in options), default=0)) >= self.max_length:
            raise SpecbeamError(
                f"{max_new_tokens} new tokens leave no room for a prompt in the {self.max_length} tokens "
                f"{self.lm.source} sees: ask for fewer (--gen_kwargs max_gen_toks=N)"
            )
        capacities = [self.max_length - o.max_new_tokens for o in options]
        prompts = self._fitted([self.tok_encode(request.args[0]) for request in requests], capacities)

        texts = [""] * len(requests)
        longest_first = sorted(range(len(requests)), key=lambda number: len(prompts[number]), reverse=True)
        engine = Engine(self.lm, max_requests=self.batch_size)
        submissions = (
            (number, engine.submit(prompts[number], options[number], draft=self.draft)) for number in longest_first
        )
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for number, request in engine.as_completed(submissions):
                texts[number] = request.result().text
                self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
                bar.update()
        return texts

    def _fitted(self, contexts: Sequence[list[int]], capacities: Sequence[int]) -> list[list[int]]:
        """Contexts of at least one token, cut on the left where they are longer than their capacity."""
        contexts = [context or [self.prefix_token_id] for context in contexts]
        cut = sum(len(context) > capacity for context, capacity in zip(contexts, capacities, strict=True))
        if cut:
            logger.warning("%d of %d contexts are too long and were cut on the left", cut, len(contexts))
        return [context[-capacity:] for context, capacity in zip(contexts, capacities, strict=True)]

    def _options_for(self, generation_kwargs: Mapping[str, Any], number: int) -> Options:
        """The options of a request: the task's generation_kwargs, overridden by the model's own arguments."""
        task = dict(generation_kwargs)
        stops = [stop for name in ("until", "stop_strings") for stop in _strings(task.pop(name, None))]
        lengths = [length for name in LENGTHS if (length := task.pop(name, None)) is not None]
        sampling = {name: task.pop(name) for name in ("do_sample", *SHAPING) if name in task}
        check_names(task, [*OPTIONS], "option in the task's generation_kwargs")

        # Tasks give options of beams and samples even without these, and do_sample together with temperature=0.
        if {**task, **self._given}.get("num_beams", 1) == 1:
            task = {name: value for name, value in task.items() if "beams" not in OPTIONS[name].needs}
        of_task = task.pop("seed", None)
        seed = of_task if self._seed is None else self._seed
        warmth, samples = sampling.get("temperature"), sampling.get("do_sample")
        if self._greedy or warmth == 0 or not (samples or (samples is None and warmth)):
            sampling = {}
        length = {"max_new_tokens": int(lengths[0])} if lengths else {}
        both = {"stop_strings": (*self._options.stop_strings, *stops)}
        options = Options.of({**task, **length, **sampling, **self._given, **both})

        ends = self._eos_token_ids if options.eos_token_id is None else options.eos_token_id
        if options.samples:  # the harness repeats requests for several samples, and seeds torch
            options = replace(options, seed=int(torch.randint(2**63 - 1, ())) if seed is None else seed + number)
        return replace(options, eos_token_id=sorted(ends))


def _strings(strings: str | Iterable[str] | None) -> list[str]:
    """One or several texts as a list, without empty ones."""
    return [text for text in ([strings] if isinstance(strings, str) else strings or ()) if text]


def _batch_size(batch_size: int | str, maximum: int | None) -> int:
    if str(batch_size).startswith("auto"):
        return maximum or 8
    if not str(batch_size).isdecimal() or not int(batch_size):
        raise not_allowed("batch_size", batch_size, 'at least 1, or "auto"')
    return int(batch_size)


def main() -> int:
    """The harness's command line. A SpecbeamError is printed in one line; then the exit status is 2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except SpecbeamError as error:
        print(f"specbeam: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
