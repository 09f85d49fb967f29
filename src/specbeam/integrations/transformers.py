"""Inside transformers: wrap a loaded model, and decode for ``model.generate``.

model.generate(**inputs, num_beams=4, custom_generate=specbeam.hf.generate)
model.generate(**inputs, num_beams=4, assistant_model=small, custom_generate=specbeam.hf.generate)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria
from transformers.generation import (
    GenerateBeamDecoderOnlyOutput,
    GenerateDecoderOnlyOutput,
    PrefixConstrainedLogitsProcessor,
)

from specbeam.backends.encoder_decoder import backend_of
from specbeam.compat import argument_of_generate
from specbeam.decoding import Strategy
from specbeam.decoding.beam import BeamSearch, beam_search
from specbeam.decoding.drafter import Drafter
from specbeam.decoding.speculative_beam import speculative_beam_search
from specbeam.engine import Engine, Setup
from specbeam.engine.strategies import make_search
from specbeam.errors import SpecbeamError
from specbeam.integrations.transformers_processors import (
    Row,
    check_processors,
    options_of,
    unsupported,
)
from specbeam.model import LanguageModel

GENERATION_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
OTHER_MODES = (
    "prompt_lookup_num_tokens",
    "use_mtp",
    "assistant_early_exit",
    "penalty_alpha",
    "dola_layers",
    "num_beam_groups",
    "constraints",
    "force_words_ids",
)
"""Options that ask for another generation mode."""
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
        eos_token_ids=frozenset(i for i in ([eos] if isinstance(eos, int) else eos or ()) if i >= 0),
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
    them repeatable. Samples of one prompt share its pass. A text ends where the model's context ends.

    Logits processors and ``prefix_allowed_tokens_fn`` get the token ids that transformers gives them, padding included.
    The texts of a call have the same length and prompt. They may be in any order, so processors must depend on their
    arguments alone.

    Returns:
        The texts, prompts included, int64 [batch * num_return_sequences, length], padded with pad_token_id. Where that
        is 0, beams are padded with the first eos_token_id, as in transformers. With ``return_dict_in_generate`` a
        ``GenerateDecoderOnlyOutput`` with ``sequences``, or for beams a ``GenerateBeamDecoderOnlyOutput`` with
        ``sequences`` and ``sequences_scores``, without the scores of each step.

    Raises:
        SpecbeamError: an option that specbeam lacks, or a model or a prompt that it cannot decode.
    """
    _refuse(model.config.is_encoder_decoder, "models with an encoder, which specbeam.generate does after hf.wrap")
    assistant_model = assistant_model or argument_of_generate("assistant_model")
    _refuse((streamer or argument_of_generate("streamer")) is not None, "a streamer")
    beams = generation_config.num_beams or 1
    returned = generation_config.num_return_sequences or 1
    do_sample = bool(generation_config.do_sample)
    _check_config(generation_config, beams, assistant_model is not None)

    engine = Engine(replace(wrap(model), generation_defaults={}))  # transformers has filled them in
    check_processors(logits_processor, engine.lm.backend.vocab_size)
    padding = _padding(input_ids, model_kwargs)
    eos = _eos_token_ids(stopping_criteria)
    length = input_ids.shape[1]
    copies = max(beams, returned)  # transformers has repeated each prompt
    # A prefix_allowed_tokens_fn gets the number of a sample, so samples are requests of their own.
    together = 1 if beams == 1 and _has_numbered_texts(logits_processor) else copies
    options: dict[str, Any] = {
        "max_new_tokens": stopping_criteria.max_length - length,
        "eos_token_id": eos,
        "do_sample": do_sample,
        "num_return_sequences": together if beams == 1 else returned,
    }
    if beams > 1:
        options |= {
            "num_beams": beams,
            "length_penalty": generation_config.length_penalty,
            "early_stopping": generation_config.early_stopping,
        }

    how: dict[str, Any] = {} if assistant_model is None else {"draft": wrap(assistant_model)}
    if beams > 1:
        how["strategy"] = partial(_beam_search, generation_config)
    requests = []
    for first in range(0, len(input_ids), together):
        row = Row(input_ids, first, padding[first], beams)
        own = options | options_of(logits_processor, row, eos, do_sample)
        own["min_new_tokens"] = min(own.get("min_new_tokens", 0), own["max_new_tokens"])
        requests.append(engine.submit(row.prompt, own | {"seed": _seed() if do_sample else None}, **how))
    engine.run()
    texts = [sequence for request in requests for sequence in request.result().sequences]

    longest = length + max(len(text.token_ids) for text in texts)
    sequences = torch.full((len(texts), longest), _fill_value(generation_config, beams))
    sequences[:, :length] = input_ids[::copies].repeat_interleave(returned, 0)
    for filled, text in zip(sequences, texts, strict=True):
        filled[length : length + len(text.token_ids)] = torch.tensor(text.token_ids)
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


def _padding(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """How many tokens of padding each row begins with. Refuses all other arguments of the model's forward."""
    mask = model_kwargs.pop("attention_mask", None)
    positions = model_kwargs.pop("position_ids", None)
    past = model_kwargs.pop("past_key_values", None)
    for name, value in model_kwargs.items():
        _refuse(value is not None and name not in IGNORED_ARGUMENTS, name)
    _refuse(past is not None and past.get_seq_length() > 0, "past_key_values with something in them")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    _refuse(mask.shape != input_ids.shape, "an attention mask of another shape than the prompts")
    if not mask.shape[1] or (mask.diff() < 0).any() or not mask[:, -1].all():
        raise SpecbeamError("the attention mask hides tokens inside or after a prompt: pad prompts on the left")
    if positions is not None:
        expected = (mask.cumsum(-1) - 1).clamp(min=0)
        positions = positions.to(input_ids.device)
        _refuse(not torch.equal(positions, expected[: len(positions)]), "position_ids other than the usual")
    padding: list[int] = (mask == 0).sum(-1).tolist()
    return padding


def _eos_token_ids(stopping_criteria: Iterable[Any]) -> list[int]:
    ids: set[int] = set()
    for criterion in stopping_criteria:
        name = f"the stopping criterion {type(criterion).__name__}"
        _refuse(type(criterion) not in (MaxLengthCriteria, EosTokenCriteria), name)
        if isinstance(criterion, EosTokenCriteria):
            ids.update(criterion.eos_token_id.tolist())
    return sorted(i for i in ids if i >= 0)  # transformers' users give -1 for none


def _beam_search(generation_config: Any, setup: Setup, drafter: Drafter | None) -> Strategy:
    """Our beam search with the candidates of transformers, and with all its places.

    Where fewer texts are possible than beams, transformers returns forbidden texts, too. It counts each end token of
    the configuration as a candidate more per beam, even if it is -1 or there twice.

    Raises:
        SpecbeamError: not enough texts come to an end. The result of transformers then depends on the batch.
    """
    eos = generation_config._eos_token_tensor
    search = make_search(setup)
    assert isinstance(search, BeamSearch)
    search.num_candidates = max(2, 1 + (0 if eos is None else len(eos))) * search.num_beams
    if drafter is None:
        yield from beam_search(setup.tree, search, setup.record)
    else:
        yield from speculative_beam_search(setup.tree, search, setup.record, drafter)
    texts = search.places()
    if len(texts) < search.num_return_sequences:
        raise SpecbeamError(
            f"num_return_sequences={search.num_return_sequences}, but only {len(texts)} texts of a prompt are "
            "possible with these options: ask for fewer texts, or allow more tokens"
        )
    return texts


def _check_config(generation_config: Any, beams: int, has_assistant: bool) -> None:
    mode = generation_config.get_generation_mode()
    for name in OTHER_MODES if mode not in GENERATION_MODES else ():
        _refuse(getattr(generation_config, name, None) not in (None, False, 1), name)
    _refuse(mode not in GENERATION_MODES, f"the generation mode {mode.value}")
    _refuse(generation_config.cache_implementation == "quantized", "a quantized cache")
    for name in ("assistant_ensemble_weight", "speculation_type") if has_assistant else ():
        _refuse(getattr(generation_config, name, None) is not None, name)
    if generation_config.return_dict_in_generate:
        for name in ("output_logits", "output_attentions", "output_hidden_states"):
            _refuse(bool(getattr(generation_config, name)), name)
        _refuse(bool(generation_config.output_scores and beams == 1), "output_scores without beams")


def _has_numbered_texts(processors: Iterable[Any]) -> bool:
    return any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in processors)


def _refuse(asked: bool, what: str) -> None:
    if asked:
        raise unsupported(what)


def _fill_value(generation_config: Any, beams: int) -> int:
    """The token id after texts that ended, by transformers' rules."""
    pad, eos = generation_config._pad_token_tensor, generation_config._eos_token_tensor
    if beams > 1:
        pad = None if eos is None else pad or eos[0]
    return -1 if pad is None else int(pad)
