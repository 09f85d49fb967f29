"""Inside transformers: wrap a loaded model, and decode for ``model.generate``.

model.generate(**inputs, num_beams=4, custom_generate=specbeam.hf.generate)
model.generate(**inputs, num_beams=4, assistant_model=small, custom_generate=specbeam.hf.generate)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput, logits_process

from specbeam.backends.encoder_decoder import backend_of
from specbeam.compat import argument_of_generate
from specbeam.decoding.beam import FORBIDDEN_SCORE
from specbeam.engine import Engine
from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel
from specbeam.results import Sequence

PROCESSORS = {
    logits_process.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    logits_process.MinLengthLogitsProcessor: ("min_new_tokens", "min_length"),
    logits_process.MinNewTokensLengthLogitsProcessor: ("min_new_tokens", "min_new_tokens"),
    logits_process.TemperatureLogitsWarper: ("temperature", "temperature"),
    logits_process.TopKLogitsWarper: ("top_k", "top_k"),
    logits_process.TopPLogitsWarper: ("top_p", "top_p"),
    logits_process.MinPLogitsWarper: ("min_p", "min_p"),
}
"""Transformers' processors that specbeam has, in the order it applies them: our option, and their attribute."""
GENERATION_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
IGNORED_ARGUMENTS = ("use_cache", "logits_to_keep", "cache_position")
"""Arguments that transformers passes on to the model's forward, and that specbeam decides itself."""


def wrap(model: Any, tokenizer: Any = None) -> LanguageModel:
    """A language model around a loaded model of transformers, which is not changed and stays the caller's.

    Args:
        model: an ``AutoModelForCausalLM`` or ``AutoModelForSeq2SeqLM`` in evaluation mode, with attention of the kind
            "sdpa" or "eager".
        tokenizer: the tokenizer that goes with it. Without one prompts are token ids, and texts are empty.

    Raises:
        SpecbeamError: a model that cannot be decoded, such as one that keeps no keys and values.
    """
    defaults = {name: value for name, value in model.generation_config.to_dict().items() if value is not None}
    eos = defaults.get("eos_token_id", getattr(tokenizer, "eos_token_id", None))
    return LanguageModel(
        source=model.name_or_path or type(model).__name__,
        backend=backend_of(model),
        tokenizer=tokenizer,
        eos_token_ids=frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos),
        generation_defaults=defaults,
    )


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    assistant_model: Any = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decode as ``model.generate`` does: to be given to it as ``custom_generate``, which calls it with these arguments.

    Greedy search and beam search return what transformers returns; with ``assistant_model`` too, in fewer passes of the
    model, and for beams as well. Samples have the same distribution, but other draws. ``torch.manual_seed`` makes
    them repeatable. A text ends where the model's context ends. Logits processors get the ids of texts of equal length,
    prompts without padding, in any order: they must depend on their arguments alone.

    Returns:
        The texts, prompts included, int64 [batch * num_return_sequences, length], padded with pad_token_id. With
        ``return_dict_in_generate`` a ``GenerateDecoderOnlyOutput`` with ``sequences``, or for beams a
        ``GenerateBeamDecoderOnlyOutput`` with ``sequences`` and ``sequences_scores``, without the scores of each step.

    Raises:
        SpecbeamError: an option that specbeam lacks, or a model or a prompt that it cannot decode.
    """
    _refuse(model.config.is_encoder_decoder, "models with an encoder, which specbeam.generate does after hf.wrap")
    assistant_model = assistant_model or argument_of_generate("assistant_model")
    _refuse((streamer or argument_of_generate("streamer")) is not None, "a streamer")
    beams = generation_config.num_beams or 1
    returned = generation_config.num_return_sequences or 1
    _check_output(generation_config, beams)

    prompts = _prompts(input_ids, model_kwargs)[:: max(beams, returned)]  # transformers has repeated each
    length = input_ids.shape[1]
    eos = _eos_token_ids(stopping_criteria)
    options = _options(logits_processor, length) | {
        "max_new_tokens": stopping_criteria.max_length - length,
        "eos_token_id": eos,
        "do_sample": bool(generation_config.do_sample),
    }
    options["min_new_tokens"] = min(options.get("min_new_tokens", 0), options["max_new_tokens"])
    if beams > 1:
        options |= {
            "num_beams": beams,
            "num_return_sequences": returned,
            "length_penalty": generation_config.length_penalty,
            "early_stopping": generation_config.early_stopping,
        }

    engine = Engine(replace(wrap(model), generation_defaults={}))  # transformers has filled them in
    draft: dict[str, Any] = {} if assistant_model is None else {"draft": wrap(assistant_model)}
    requests = []
    for number, prompt in enumerate(prompts):
        if allowed := options.get("prefix_allowed_tokens_fn"):  # its first argument is the number of the prompt
            own = {"prefix_allowed_tokens_fn": lambda _, ids, number=number: allowed(number, ids)}
        else:
            own = {}
        for _ in range(1 if beams > 1 else returned):
            seed = _seed() if options["do_sample"] else None
            requests.append(engine.submit(prompt, {**options, **own, "seed": seed}, **draft))
    engine.run()
    texts = [sequence for request in requests for sequence in _filled(request.result().sequences, beams, returned)]

    pad = generation_config._pad_token_tensor
    sequences = torch.full((len(texts), length + max(len(t.token_ids) for t in texts)), -1 if pad is None else int(pad))
    sequences[:, :length] = input_ids[:: max(beams, returned)].repeat_interleave(returned, 0)
    for row, text in zip(sequences, texts, strict=True):
        row[length : length + len(text.token_ids)] = torch.tensor(text.token_ids)
    sequences = sequences.to(input_ids.device)
    if not generation_config.return_dict_in_generate:
        return sequences
    if beams == 1:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    scores = torch.tensor([text.score for text in texts], device=input_ids.device)
    return GenerateBeamDecoderOnlyOutput(sequences=sequences, sequences_scores=scores)


def _seed() -> int:
    """A seed for one request, drawn from the generator that ``torch.manual_seed`` sets."""
    return int(torch.randint(2**63 - 1, ()))


def _options(processors: Iterable[Any], prompt_length: int) -> dict[str, Any]:
    """Our options for logits processors, both from the generation config and the caller's own."""
    options: dict[str, Any] = {"logits_processor": []}
    last: type = type(None)
    for processor in processors:
        kind = type(processor)
        _refuse(_turn(kind) < _turn(last), f"{kind.__name__} after {last.__name__}")
        last = kind
        _refuse(isinstance(getattr(processor, "prompt_ignore_length", None), int), "prompt_ignore_length")
        if kind is logits_process.PrefixConstrainedLogitsProcessor:
            options["prefix_allowed_tokens_fn"] = processor._prefix_allowed_tokens_fn
        elif kind not in PROCESSORS:
            options["logits_processor"].append(processor)
        else:
            option, attribute = PROCESSORS[kind]
            value = getattr(processor, attribute)
            if kind is logits_process.MinLengthLogitsProcessor:
                value -= prompt_length
            options[option] = max(value, options.get(option, 0)) if option == "min_new_tokens" else value
    return options


def _turn(kind: type) -> int:
    """The order of processors in specbeam: penalties, then bans and the caller's own processors, then warpers."""
    known = [*PROCESSORS]
    warpers = known.index(logits_process.TemperatureLogitsWarper)
    if kind in (type(None), logits_process.RepetitionPenaltyLogitsProcessor):
        return 0
    return max(1, 2 + known.index(kind) - warpers) if kind in known else 1


def _prompts(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """The rows without their padding. Refuses all other arguments of the model's forward."""
    mask = model_kwargs.pop("attention_mask", None)
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    if (mask.diff() < 0).any() or not mask[:, -1].all():
        raise SpecbeamError("the attention mask hides tokens inside or after a prompt: pad prompts on the left")
    positions = model_kwargs.pop("position_ids", None)
    expected = (mask.cumsum(-1) - 1).clamp(min=0)
    if positions is not None:
        positions = positions.to(input_ids.device)
        _refuse(not torch.equal(positions, expected[: len(positions)]), "position_ids other than the usual")
    past = model_kwargs.pop("past_key_values", None)
    _refuse(past is not None and past.get_seq_length() > 0, "past_key_values with something in them")
    for name, value in model_kwargs.items():
        _refuse(value is not None and name not in IGNORED_ARGUMENTS, name)
    return [row[kept].tolist() for row, kept in zip(input_ids, mask.bool(), strict=True)]


def _eos_token_ids(stopping_criteria: Iterable[Any]) -> list[int]:
    ids: set[int] = set()
    for criterion in stopping_criteria:
        name = f"the stopping criterion {type(criterion).__name__}"
        _refuse(type(criterion) not in (MaxLengthCriteria, EosTokenCriteria), name)
        if isinstance(criterion, EosTokenCriteria):
            ids.update(criterion.eos_token_id.tolist())
    return sorted(i for i in ids if i >= 0)  # transformers' users give -1 for none


def _check_output(generation_config: Any, beams: int) -> None:
    mode = generation_config.get_generation_mode()
    _refuse(mode not in GENERATION_MODES, f"the generation mode {mode.value}")
    if generation_config.return_dict_in_generate:
        for name in ("output_logits", "output_attentions", "output_hidden_states"):
            _refuse(bool(getattr(generation_config, name)), name)
        _refuse(bool(generation_config.output_scores and beams == 1), "output_scores without beams")


def _refuse(asked: bool, what: str) -> None:
    if asked:
        raise SpecbeamError(f"specbeam.hf.generate does not support {what}: leave it out, or custom_generate")


def _filled(sequences: list[Sequence], beams: int, returned: int) -> list[Sequence]:
    """As many texts as transformers returns. If fewer beams finish, it fills up with empty texts of the worst score."""
    missing = returned - len(sequences) if beams > 1 else 0
    return sequences + [Sequence("", [], FORBIDDEN_SCORE, "length")] * missing
