"""Inside transformers: wrap a loaded model, and decode for ``model.generate``.

model.generate(**inputs, num_beams=4, custom_generate=specbeam.hf.generate)
model.generate(**inputs, num_beams=4, draft="ngram", custom_generate=specbeam.hf.generate)
model.generate(**inputs, num_beams=4, assistant_model=small, custom_generate=specbeam.hf.generate)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, PreTrainedModel, StopStringCriteria
from transformers.generation import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    InfNanRemoveLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)

from specbeam.backends.transformers import check_weights, context_length_of
from specbeam.backends.transformers.compat import CACHE, argument_of_generate
from specbeam.backends.transformers.encoder_decoder import backend_of
from specbeam.engine import Engine, Request
from specbeam.errors import SpecbeamError, not_allowed
from specbeam.integrations.transformers.processors import BatchRows, check_processors, options_of
from specbeam.integrations.transformers.prompts import Prompts, refuse
from specbeam.integrations.transformers.steps import Details, Steps
from specbeam.models.model import LanguageModel, warn_of_settings
from specbeam.options.declared import MAX_SIZES
from specbeam.options.generation_defaults import GenerationDefaults

GENERATION_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
OTHER_MODES = (
    "use_mtp",
    "assistant_early_exit",
    "penalty_alpha",
    "dola_layers",
    "num_beam_groups",
    "constraints",
    "force_words_ids",
)
"""Options that ask for another generation mode."""
READ_ARGUMENTS = (
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "inputs_embeds",
    CACHE,
    "encoder_outputs",
    "decoder_attention_mask",
)
"""Arguments of the model's forward that specbeam understands."""
IGNORED_ARGUMENTS = ("use_cache", "logits_to_keep", "cache_position", "output_attentions", "output_hidden_states")
"""Arguments that transformers passes on to the model's forward, and that specbeam decides itself."""
OUTPUTS = {
    (False, False): GenerateDecoderOnlyOutput,
    (False, True): GenerateBeamDecoderOnlyOutput,
    (True, False): GenerateEncoderDecoderOutput,
    (True, True): GenerateBeamEncoderDecoderOutput,
}
"""The classes for ``return_dict_in_generate``: by whether the model has an encoder, and whether there are beams."""


def wrap(model: Any, tokenizer: Any = None) -> LanguageModel:
    """A language model around a loaded model of transformers, which is not changed and stays the caller's.

    Args:
        model: an ``AutoModelForCausalLM`` or ``AutoModelForSeq2SeqLM`` in evaluation mode, with attention of the kind
            "sdpa" or "eager".
        tokenizer: the tokenizer that goes with it. Without one prompts are token ids, and texts are empty.

    Raises:
        SpecbeamError: no loaded model, or one that cannot be decoded, such as one that keeps no keys and values. Also
            weights that are not finite.
    """
    lm = _wrap(model, tokenizer)
    warn_of_settings(lm)
    return lm


def _wrap(model: Any, tokenizer: Any, must_be_finite: bool = True) -> LanguageModel:
    """The same without a warning."""
    if getattr(model, "generation_config", None) is None:  # a model without a head has None
        is_name = isinstance(model, str | os.PathLike)
        what = f"model={model!r}" if is_name else f"an object of type {type(model).__name__}"
        raise SpecbeamError(
            f"{what} is no model of transformers that generates text: give what AutoModelForCausalLM.from_pretrained "
            "or AutoModelForSeq2SeqLM.from_pretrained returns. specbeam.load takes names and folders"
        )
    defaults = GenerationDefaults(model.generation_config.to_dict(), "generation_config")
    eos = defaults.get("eos_token_id", getattr(tokenizer, "eos_token_id", None))
    lm = LanguageModel(
        source=model.name_or_path or type(model).__name__,
        backend=backend_of(model),
        tokenizer=tokenizer,
        eos_token_ids=frozenset(i for i in ([eos] if isinstance(eos, int) else eos or ()) if i >= 0),
        generation_defaults=defaults,
    )
    if must_be_finite:
        check_weights(model, type(model).__name__)
    return lm


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    assistant_model: Any = None,
    streamer: Any = None,
    *,
    draft: Any = None,
    prompt_lookup_num_tokens: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode as ``model.generate`` does: to be given to it as ``custom_generate``, which calls it with these arguments.

    Greedy search and beam search return what transformers returns; with a draft too, in fewer forward passes, and for
    beams as well. Samples have the same distribution, but other draws. ``torch.manual_seed`` makes them repeatable.
    Samples of one prompt share its pass. A text ends where the model's context ends.

    Logits processors, ``prefix_allowed_tokens_fn`` and stopping criteria get the token ids that transformers gives
    them, padding included. The texts of a call have the same length and prompt. They may be in any order, so these
    functions must depend on their arguments alone. A stopping criterion may also depend on the time. It is called after
    each new token, and not for draft tokens.

    Args:
        assistant_model: a draft model: a loaded model of transformers. transformers warns that beams ignore it, because
            its own beams do. With ``draft`` there is no warning.
        streamer: gets the prompt, and each token as soon as it is final. Not with beams.
        draft: the same as ``assistant_model``, or a model that :func:`specbeam.load` returned, "ngram", "suffix", or an
            automaton that :func:`specbeam.suffix_automaton` returned.
        prompt_lookup_num_tokens: the n-gram draft, with at most this many tokens ahead.
        stop_strings: end a text where one of these ends, as ``StopStringCriteria`` does. Needs the tokenizer.
        tokenizer: for stop strings, and for a draft with another vocabulary.
        assistant_tokenizer: of the draft, if it is a model of transformers with another vocabulary.
        inputs_tensor: the encoder's token ids, which transformers gives.

    Returns:
        The texts, prompts included, int64 [batch * num_return_sequences, length], padded with pad_token_id. Where that
        is 0, beams are padded with the first eos_token_id, as in transformers. With ``return_dict_in_generate`` the
        output of transformers with ``sequences``. With beams it has ``sequences_scores`` and ``beam_indices``, int32
        [batch * num_return_sequences, new tokens]. With ``output_scores`` it has ``scores``, float32
        [batch * num_beams, vocab] per step, without beams [batch * num_return_sequences, vocab]. With ``output_logits``
        it has ``logits`` of the same shape. After the end of a text the padding has the score 0, and all other tokens
        have -inf.

    Raises:
        SpecbeamError: an option that specbeam lacks, or a model or a prompt that it cannot decode.
    """
    assistant_model = assistant_model or argument_of_generate("assistant_model")
    tokenizer = tokenizer or argument_of_generate("tokenizer")
    assistant_tokenizer = assistant_tokenizer or argument_of_generate("assistant_tokenizer")
    has_prompt = streamer is None  # a streamer that generate keeps to itself has the prompt already
    streamer = argument_of_generate("streamer") if streamer is None else streamer
    if None in (logits_processor, stopping_criteria, generation_config):
        raise SpecbeamError(
            "specbeam.hf.generate is not to be called, but given to the model: "
            "model.generate(..., custom_generate=specbeam.hf.generate). To call specbeam itself, use "
            "specbeam.generate(specbeam.hf.wrap(model, tokenizer), prompt)"
        )
    _check_streamer(streamer)
    beams = generation_config.num_beams or 1
    _check_config(generation_config, beams, assistant_model is not None)
    if beams > 1 and streamer is not None:
        raise SpecbeamError(
            "`streamer` cannot be used with beam search: set num_beams to 1. To stream the text that all beams share, "
            "use specbeam.stream(specbeam.hf.wrap(model, tokenizer), prompt, num_beams=...)"
        )
    _check_arguments(model_kwargs)
    bridged = isinstance(draft, LanguageModel) or assistant_tokenizer is not None  # another vocabulary, by way of text
    own_tokenizer = tokenizer if bridged else None
    replaces_invalid = any(isinstance(p, InfNanRemoveLogitsProcessor) for p in logits_processor)
    lm = _wrap(model, own_tokenizer, must_be_finite=not replaces_invalid)
    lm = replace(lm, generation_defaults=GenerationDefaults())  # transformers has filled them in
    returned = generation_config.num_return_sequences or 1
    copies = max(beams, returned)  # transformers has repeated each prompt
    if model.config.is_encoder_decoder:
        lm.backend.start_token_ids = input_ids[0].tolist()
        lm.backend.encoder_reads = "tokens"  # or audio, for whose positions the prompts have token ids
    lm.backend.context_length = context_length_of(model.config.get_text_config())
    prompts = Prompts(
        cast(Any, lm.backend), input_ids, copies, beams > 1, generation_config, inputs_tensor, model_kwargs
    )
    lookup = prompt_lookup_num_tokens or generation_config.prompt_lookup_num_tokens
    how = _draft(lm, assistant_tokenizer, draft=draft, assistant_model=assistant_model, prompt_lookup_num_tokens=lookup)
    has_model = isinstance(how.get("draft"), LanguageModel)
    refuse(has_model and lm.backend.start_token_ids is not None and not prompts.have_ids, "a draft without input_ids")
    check_processors(logits_processor, lm.backend.vocab_size, beams)
    eos, criteria = _ends(stopping_criteria, stop_strings, tokenizer)
    if criteria and eos is None and beams == 1 and len(input_ids) > 1:
        raise SpecbeamError(
            "stopping_criteria of several texts need an eos_token_id: without one, transformers goes on with texts "
            "that have ended. Give one, or generate one text per call"
        )

    length = input_ids.shape[1]
    keep = None if prompts.cache is None else prompts.kept
    details = Details(generation_config, replaces_invalid, keep)
    # Samples are requests of their own if a prefix_allowed_tokens_fn gets their numbers, or if each has a draft, a
    # streamer, scores, logits or a cache.
    is_numbered = any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in logits_processor)
    alone = is_numbered or how or details.scores or details.logits or keep is not None
    together = 1 if beams == 1 and (alone or streamer is not None) else copies
    do_sample = bool(generation_config.do_sample)
    options: dict[str, Any] = {
        "max_new_tokens": stopping_criteria.max_length - length,
        "eos_token_id": sorted(i for i in eos or () if i >= 0),  # transformers' users give -1 for none
        "do_sample": do_sample,
        "num_return_sequences": together if beams == 1 else returned,
    }
    if beams > 1:
        options |= {
            "num_beams": beams,
            "length_penalty": generation_config.length_penalty,
            "early_stopping": generation_config.early_stopping,
        }
    if lookup:
        options["num_draft_tokens"] = min(lookup, MAX_SIZES["num_draft_tokens"])

    # Criteria may count the time, so with them no text waits for others to end.
    engine = Engine(lm, max_requests=len(input_ids)) if criteria else Engine(lm)
    requests, steps = [], []
    for first in range(0, len(input_ids), together):
        prompt = prompts.of_row(first, len(input_ids))
        begin = len(lm.backend.start_token_ids or prompt.token_ids)
        row = BatchRows(input_ids, first, begin, prompt.padding, beams)
        of_row = options | options_of(logits_processor, row, options["eos_token_id"], do_sample)
        of_row["min_new_tokens"] = min(of_row.get("min_new_tokens", 0), of_row["max_new_tokens"])
        of_row["seed"] = _seed() if do_sample else None
        steps.append(Steps(row, criteria, details))
        requests.append(
            engine.submit(prompt.token_ids, of_row, strategy=steps[-1].strategy, source=prompt.source, **how)
        )
    fill = _fill_value(generation_config, beams)
    if streamer is not None and not has_prompt:
        streamer.put(input_ids.cpu())
    _run(engine, requests, streamer, fill)
    texts = [sequence for request in requests for sequence in request.result().sequences]
    _check_lengths(model, requests, lm.backend, options["max_new_tokens"])

    device = input_ids.device
    longest = max(len(text.token_ids) for text in texts)
    new = torch.tensor([text.token_ids + [fill] * (longest - len(text.token_ids)) for text in texts], device=device)
    sequences = torch.cat([input_ids[::copies].repeat_interleave(returned, 0), new], dim=1)
    if prompts.cache is not None:
        prompts.fill_cache([of.kept for of in steps])
    if not generation_config.return_dict_in_generate:
        return sequences
    outputs: dict[str, Any] = {"sequences": sequences}
    if details.scores:
        outputs["scores"] = _by_step([of.scores for of in steps], fill, device)
    if details.logits:
        outputs["logits"] = _by_step([of.logits for of in steps], fill, device)
    if prompts.cache is not None:
        outputs[CACHE] = prompts.cache
    if beams > 1:
        if details.scores:
            outputs["sequences_scores"] = torch.tensor([text.score for text in texts], device=device)
        outputs["beam_indices"] = _beam_indices(steps, beams, longest).to(device)
    return OUTPUTS[bool(model.config.is_encoder_decoder), beams > 1](**outputs)


def _draft(lm: LanguageModel, tokenizer: Any, **arguments: Any) -> dict[str, Any]:
    """The draft that one of the arguments asks for, as an argument of ``Engine.submit``; empty without one."""
    asked = {name: value for name, value in arguments.items() if value is not None}
    if len(asked) > 1:
        raise SpecbeamError(f"{' and '.join(asked)} each ask for a draft: leave out all but one")
    if "prompt_lookup_num_tokens" in asked:
        return {"draft": "ngram"}
    for name, value in asked.items():
        if name == "draft" and not isinstance(value, PreTrainedModel):
            return {"draft": value}
        wrapped = _wrap(value, tokenizer)
        if None not in (lm.backend.start_token_ids, wrapped.backend.start_token_ids):
            wrapped.backend.start_token_ids = lm.backend.start_token_ids  # the caller's decoder_input_ids
        return {"draft": wrapped}
    return {}


def _run(engine: Engine, requests: list[Request], streamer: Any, fill: int) -> None:
    """Work until all texts are finished. A streamer gets a token of each text at once, int64 [texts], as they come."""
    if streamer is None:
        engine.run()
        return
    texts: list[list[int]] = [[] for _ in requests]
    streamed, more = 0, True
    while more:
        more = engine.step()
        for text, request in zip(texts, requests, strict=True):
            while request.pieces:
                text += request.pieces.popleft().token_ids
        growing = [len(text) for text, request in zip(texts, requests, strict=True) if not request.done]
        certain = min(growing) if growing else max(map(len, texts))
        for at in range(streamed, certain):
            streamer.put(torch.tensor([text[at] if at < len(text) else fill for text in texts]))
        streamed = max(streamed, certain)
    streamer.end()


def _by_step(kept: list[list[Tensor]], fill: int, device: torch.device) -> tuple[Tensor, ...]:
    """The scores of all requests by step, float32 [rows, vocab] each, from the scores of each request by step.

    After a request's last step its rows have the score 0 for the padding, and -inf for all other tokens.
    """
    after = torch.full_like(kept[0][0], float("-inf"))
    if 0 <= fill < after.shape[-1]:
        after[:, fill] = 0.0
    steps = range(max(map(len, kept)))
    return tuple(torch.cat([of[at] if at < len(of) else after for of in kept]).to(device) for at in steps)


def _beam_indices(steps: list[Steps], beams: int, new_tokens: int) -> Tensor:
    """The numbers of the beams that the tokens of the texts continue, int32 [texts, new tokens]; -1 after a text."""
    rows = [[number * beams + beam for beam in text] for number, of in enumerate(steps) for text in of.beam_indices]
    return torch.tensor([row + [-1] * (new_tokens - len(row)) for row in rows], dtype=torch.int32)


def _seed() -> int:
    """A seed for one request, drawn from the generator that ``torch.manual_seed`` sets."""
    return int(torch.randint(2**63 - 1, ()))


def _check_streamer(streamer: Any) -> None:
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise not_allowed("streamer", streamer, "a streamer of transformers, such as TextStreamer(tokenizer)")


def _check_arguments(model_kwargs: dict[str, Any]) -> None:
    """Refuse arguments of the model's forward that specbeam does not understand."""
    for name, value in model_kwargs.items():
        refuse(value is not None and name not in READ_ARGUMENTS + IGNORED_ARGUMENTS, name)


def _check_lengths(model: Any, requests: Sequence[Request], backend: Any, asked: int) -> None:
    """Refuse texts that the model's positions have cut off: transformers goes on, or fails there."""
    for request in requests:
        for text in request.result().sequences:
            begin = len(backend.start_token_ids or request.prompt_ids)
            room = backend.context_length - begin
            if text.finish_reason == "length" and len(text.token_ids) == room < asked:
                raise SpecbeamError(
                    f"a text of {begin + asked} tokens was asked for, and {type(model).__name__} has positions for "
                    f"{backend.context_length}: ask for at most {room} new tokens"
                )


def _ends(
    stopping_criteria: Iterable[Any], stop_strings: str | Sequence[str] | None, tokenizer: Any
) -> tuple[set[int] | None, list[Any]]:
    """The end tokens, None without a criterion for them, and the criteria other than end tokens and lengths."""
    eos: set[int] | None = None
    criteria = []
    for criterion in stopping_criteria:
        if type(criterion) is EosTokenCriteria:
            eos = (eos or set()) | {*criterion.eos_token_id.tolist()}
        elif type(criterion) is not MaxLengthCriteria:
            criteria.append(criterion)
    if stop_strings is not None:
        if tokenizer is None:
            raise SpecbeamError("stop_strings need the model's tokenizer: give tokenizer=, too")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    return eos, criteria


def _check_config(generation_config: Any, beams: int, has_assistant: bool) -> None:
    config = copy.copy(generation_config)
    config.prompt_lookup_num_tokens = None  # asks for a draft, not for another mode
    mode = config.get_generation_mode()
    for name in OTHER_MODES if mode not in GENERATION_MODES else ():
        refuse(getattr(generation_config, name, None) not in (None, False, 1), name)
    refuse(mode not in GENERATION_MODES, f"the generation mode {mode.value}")
    refuse(generation_config.cache_implementation == "quantized", "a quantized cache")
    refuse(bool(generation_config.low_memory and beams > 1), "low_memory with beams")
    for name in ("assistant_ensemble_weight", "speculation_type") if has_assistant else ():
        refuse(getattr(generation_config, name, None) is not None, name)
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            refuse(bool(getattr(generation_config, name)), name)
        refuse(bool(generation_config.output_logits and beams > 1), "output_logits with beams")


def _fill_value(generation_config: Any, beams: int) -> int:
    """The token id after texts that ended, by transformers' rules."""
    pad, eos = generation_config._pad_token_tensor, generation_config._eos_token_tensor
    if beams > 1:
        pad = None if eos is None else pad or eos[0]
    return -1 if pad is None else int(pad)
