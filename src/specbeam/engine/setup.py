"""The objects that the strategy and the drafter of one request share, made from its options."""

from __future__ import annotations

from dataclasses import dataclass

from specbeam.decoding.checkpoint_processors import processors_of_checkpoint
from specbeam.decoding.processors import Processors, check_token_ids
from specbeam.decoding.record import Record
from specbeam.decoding.selector import Selector, some_seed, warpers_of
from specbeam.decoding.stopping import Stopping
from specbeam.engine.costs import Costs, SharedCost
from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel
from specbeam.options import Options
from specbeam.prompts import room, too_long
from specbeam.tree import Tree


@dataclass(frozen=True)
class Setup:
    """The objects that the strategy and the drafter of one request share.

    Attributes:
        options: with the checkpoint's defaults filled in.
        tree: the prompt, or the start tokens of an encoder-decoder model.
        selector: makes the selection requests at nodes, with the request's processors, warpers and noise.
        stop: decides where sequences end.
        record: counts draft tokens, and remembers rounds for the trace.
        cost: of the target's passes for this request, in which it may evaluate any number of nodes.
        goes_ahead: whether the backend goes ahead in passes without draft tokens, if it can.
        plain_cost: of passes without draft tokens.
    """

    options: Options
    tree: Tree
    selector: Selector
    stop: Stopping
    record: Record
    cost: SharedCost
    goes_ahead: bool
    plain_cost: SharedCost


def make_setup(lm: LanguageModel, prompt_ids: list[int], options: Options, costs: Costs, writes: bool = True) -> Setup:
    """Check the options against the model, and make what strategy and drafter work with.

    Args:
        writes: whether there are new tokens.

    Raises:
        SpecbeamError: a prompt as long as the context, or an option that the model cannot honour.
    """
    backend = lm.backend
    if len(prompt_ids) > (most := room(lm, writes)):
        raise too_long(lm, f"{len(prompt_ids):,}", most)
    if options.stop_strings and lm.tokenizer is None:
        raise SpecbeamError(f"stop_strings need a text to look in, and {lm.source} has no tokenizer: leave them out")
    check_token_ids(options, backend.vocab_size)
    begin = prompt_ids if backend.start_token_ids is None else backend.start_token_ids
    options = options.with_defaults(lm.generation_defaults, len(begin))
    eos = lm.eos_token_ids if options.eos_token_id is None else frozenset(options.eos_token_id)
    if foreign := [token for token in eos if token >= backend.vocab_size]:
        raise SpecbeamError(f"eos_token_id {foreign[0]} is not in the vocabulary of {backend.vocab_size}")
    if options.constraint is not None and not eos:
        raise SpecbeamError("a constraint needs a token that ends the text, and the model lacks one: give eos_token_id")
    max_length = min(len(begin) + options.max_new_tokens, backend.context_length)
    of_checkpoint = processors_of_checkpoint(
        lm.generation_defaults, options, eos, prompt_ids, len(begin), max_length, backend.vocab_size
    )
    tree = Tree(begin)
    process = Processors(options, eos, backend.vocab_size, of_checkpoint, backend.device)
    decode = None if lm.tokenizer is None else lm.decode
    stop = Stopping(eos, max_length, options.stop_strings, decode, options.min_new_tokens or 0)
    warpers, seed = (warpers_of(options), some_seed(options.seed)) if options.samples else (None, None)
    selector = Selector(process, warpers, seed, step_by_step=options.trace or options.top_logprobs is not None)
    draws_beams = options.num_beams > 1 and (options.samples or options.num_beam_groups > 1)
    goes_ahead = hasattr(backend, "forward_ahead") and selector.ahead(tree, tree.tip, stop) > 0 and not draws_beams
    return Setup(
        options=options,
        tree=tree,
        selector=selector,
        stop=stop,
        record=Record(tree, lm.token_text if options.trace else None),
        cost=SharedCost(costs(backend)),
        goes_ahead=goes_ahead,
        plain_cost=SharedCost(costs(backend, goes_ahead)),
    )
