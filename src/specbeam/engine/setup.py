"""What a request's options make: the objects that its strategy and its drafter share."""

from __future__ import annotations

from dataclasses import replace

from specbeam.core.tree import Tree
from specbeam.decoding.setup import Setup
from specbeam.drafting.policy import SharedCost
from specbeam.engine.costs import Costs
from specbeam.errors import SpecbeamError
from specbeam.logits.checkpoint_processors import processors_of_checkpoint
from specbeam.logits.processors import Processors, check_token_ids
from specbeam.logits.selector import Selector, some_seed, warpers_of
from specbeam.logits.stopping import Stopping
from specbeam.models.model import LanguageModel
from specbeam.models.prompts import max_prompt_length, too_long
from specbeam.options.options import Options
from specbeam.recording.record import Record, Trace
from specbeam.structured.grammar import GrammarConstraint, OutputSpec


def make_setup(lm: LanguageModel, prompt_ids: list[int], options: Options, costs: Costs, writes: bool = True) -> Setup:
    """Check the options against the model, and make what strategy and drafter work with.

    Args:
        writes: whether there are new tokens.

    Raises:
        SpecbeamError: a prompt as long as the context, or an option that the model cannot honour.
    """
    backend = lm.backend
    if len(prompt_ids) > (max_tokens := max_prompt_length(lm, writes)):
        raise too_long(lm, f"{len(prompt_ids):,}", max_tokens)
    if options.stop_strings and lm.tokenizer is None:
        says = f"stop_strings need a text to look in, and {lm.source} has no tokenizer: leave them out"
        raise SpecbeamError(says, option="stop_strings")
    check_token_ids(options, backend.vocab_size)
    begin = prompt_ids if backend.start_token_ids is None else backend.start_token_ids
    defaults = lm.generation_defaults if options.constraint is None else lm.generation_defaults.under_constraint
    options = options.with_defaults(defaults, len(begin))
    eos = lm.eos_token_ids if options.eos_token_id is None else frozenset(options.eos_token_id)
    if foreign := [token for token in eos if token >= backend.vocab_size]:
        says = f"eos_token_id {foreign[0]} is not in the vocabulary of {backend.vocab_size}"
        raise SpecbeamError(says, option="eos_token_id")
    if options.constraint is not None and not eos:
        raise SpecbeamError(
            "a constraint needs a token that ends the text, and the model lacks one: give eos_token_id",
            option=("constraint", "eos_token_id"),
        )
    if isinstance(options.constraint, GrammarConstraint):  # copies share a lexer, and a limit of one of them ends all
        options = replace(options, constraint=options.constraint.spec)
    constraint = options.constraint
    if isinstance(constraint, OutputSpec):  # a parser of the request's own
        many = options.num_beams > 1 and options.num_return_sequences > 1 and options.is_distinct
        constraint = (constraint.listed(lm) if many else None) or constraint.compile(lm)
    max_length = min(len(begin) + options.max_new_tokens, backend.context_length)
    of_checkpoint = processors_of_checkpoint(
        defaults, options, eos, prompt_ids, len(begin), max_length, backend.vocab_size
    )
    tree = Tree(begin)
    decode = None if lm.tokenizer is None else lm.decode
    # A text that satisfies a constraint would not do so with the text of its end token.
    written = frozenset(end for end in eos if constraint is not None and lm.decode([end]))
    process = Processors(
        replace(options, constraint=constraint), eos, backend.vocab_size, of_checkpoint, backend.device, written
    )
    stop = Stopping(eos, max_length, options.stop_strings, decode, options.min_new_tokens or 0, written)
    warpers, seed = (warpers_of(options), some_seed(options.seed)) if options.samples else ((), None)
    selector = Selector(process, warpers, seed, step_by_step=options.trace or options.top_logprobs is not None)
    draws_beams = options.num_beams > 1 and (options.samples or options.num_beam_groups > 1)
    goes_ahead = hasattr(backend, "forward_ahead") and selector.ahead(tree, tree.tip, stop) > 0 and not draws_beams
    return Setup(
        options=options,
        tree=tree,
        selector=selector,
        stop=stop,
        record=Record(tree, Trace(tree, lm.token_text, process.constraint) if options.trace else None),
        cost=SharedCost(costs(backend).expected),
        plain_cost=SharedCost(costs(backend, goes_ahead).expected),
    )
