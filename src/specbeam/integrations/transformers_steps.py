"""The steps of one request as transformers' ``generate`` has them: their scores, and the stopping criteria after each.

The request runs as any other. :class:`Steps` observes its strategy: the selections of the target, and the steps. A
single sequence takes a step when its stopping rule is called, and beams when their search does. So draft tokens are
neither recorded nor shown to a stopping criterion.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import StoppingCriteriaList

from specbeam.backends.compat import ranks_draws
from specbeam.backends.torch.selecting import changed
from specbeam.core.selection import Selection, SelectionRequest
from specbeam.core.strategy import Evaluate, Hypothesis, Strategy
from specbeam.core.tree import Nodes, Tree
from specbeam.decoding.beam import BeamSearch
from specbeam.decoding.beam_search import beam_search
from specbeam.decoding.candidates import Candidates, Continuations, Mask, Scores
from specbeam.decoding.strategies import make_strategy
from specbeam.drafting.drafter import Drafter
from specbeam.engine import Setup
from specbeam.errors import SpecbeamError
from specbeam.integrations.transformers_processors import BatchRows
from specbeam.integrations.transformers_prompts import KeysAndValues
from specbeam.logits.stopping import Stopping


class Details:
    """The details of each step that a generation config of transformers asks for.

    Attributes:
        scores, logits: whether to record them.
        any_logits: go on where the logits are not finite: a processor replaces them.
        keep: copies keys and values of a live sequence's nodes. None if nobody asks for them.
        num_candidates: the candidates per beam. Each end token of the configuration counts, even if it is -1 or there
            twice.
    """

    def __init__(
        self, generation_config: Any, any_logits: bool, keep: Callable[[Tree, Nodes], KeysAndValues] | None
    ) -> None:
        self.keep = keep
        recorded = bool(generation_config.return_dict_in_generate)
        self.scores = recorded and bool(generation_config.output_scores)
        self.logits = recorded and bool(generation_config.output_logits)
        self.any_logits = any_logits
        eos = generation_config._eos_token_tensor
        self.num_candidates = max(2, 1 + (0 if eos is None else len(eos)))


class Steps:
    """The steps of one request.

    Args:
        row: the rows of the batch that the request answers.
        criteria: the caller's stopping criteria.
        details: the details to record.

    Attributes:
        scores: the processed scores of each step, float32 [num_beams, vocab] each: log-probabilities with beams, else
            logits.
        logits: the model's logits of each step, float32 [1, vocab] each. Without beams only.
        kept: the keys and values of all new tokens but the last. Without beams only.
        beam_indices: for each hypothesis that beam search returns, the numbers of the beams that its tokens continue.
    """

    def __init__(self, row: BatchRows, criteria: Sequence[Any], details: Details) -> None:
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.kept: KeysAndValues = []
        self.beam_indices: list[list[int]] = []
        self._row = row
        self._criteria = StoppingCriteriaList(criteria)
        self._details = details
        self._has_beams = row.num_beams > 1
        self._recorded = (details.scores or details.logits) and not self._has_beams
        self._rows: dict[int, int] = {}  # of the target's latest selection, by node
        self._latest = torch.empty(0), torch.empty(0)  # scores and logits of these rows

    def strategy(self, setup: Setup, drafter: Drafter | None) -> Strategy:
        """The strategy that the options ask for, observed: to be given to ``Engine.submit``."""
        if self._criteria or self._recorded:
            step = None if self._has_beams else self._step
            setup = replace(setup, stop=ObservedStopping(setup.stop, self._met, step))
        strategy = self._beam_search(setup, drafter) if self._has_beams else make_strategy(setup, drafter)
        return self._observed(setup.tree, strategy)

    def _observed(self, tree: Tree, strategy: Strategy) -> Strategy:
        """The same strategy. The target's latest selection is kept, and so are its sequence's keys and values."""
        step = next(strategy)
        try:
            while True:
                if isinstance(step, Evaluate):
                    step.any_logits |= self._details.any_logits
                try:
                    selection = yield step
                except SpecbeamError as problem:
                    step = strategy.throw(problem)
                    continue
                if self._recorded and isinstance(step, Evaluate) and not step.drafting:
                    assert step.selection_request is not None
                    self._rows = {int(node): row for row, node in enumerate(step.nodes)}
                    self._latest = changed_rows(selection, step.selection_request), selection.logits
                step = strategy.send(selection)
        except StopIteration as finished:
            texts: list[Hypothesis] = finished.value
        if self._details.keep is not None:
            self.kept = self._details.keep(tree, tree.path(texts[0].node)[tree.prompt_length : -1])
        return texts

    def _step(self, tree: Tree, node: int) -> bool:
        """Record the step by which a single sequence got its last node. Returns whether it meets a criterion."""
        if self._recorded:
            row = self._rows[int(tree.parents(node))]
            scores, logits = (of_all[row : row + 1] for of_all in self._latest)
            if self._details.scores:
                self.scores.append(scores.clone())  # else it would keep the logits of the whole pass
            if self._details.logits:
                self.logits.append(logits.clone())
        return bool(self._criteria) and bool(self._met(tree, np.array([node]))[0])

    def _beam_search(self, setup: Setup, drafter: Drafter | None) -> Strategy:
        """Our beam search with the candidates of transformers, and with all its finished hypotheses.

        Where fewer hypotheses are possible than beams, transformers returns forbidden ones, too.

        Raises:
            SpecbeamError: not enough hypotheses finish. The result of transformers then depends on the batch.
        """
        search = TransformersBeamSearch.of(setup, bounded=False, kept=self.scores if self._details.scores else None)
        search.num_candidates = self._details.num_candidates * search.num_beams
        yield from beam_search(search, setup.record, drafter)
        texts = search.kept()
        if len(texts) < search.num_return_sequences:
            found = f"only {len(texts)} texts" if texts else "no texts"
            raise SpecbeamError(
                f"num_return_sequences={search.num_return_sequences}, but {found} of a prompt are possible with these "
                f"options: {'ask for fewer texts, or ' if texts else ''}allow more tokens"
            )
        self.beam_indices = search.beam_indices()
        return texts

    def _met(self, tree: Tree, nodes: Nodes) -> NDArray[np.bool_]:
        """Which of the sequences that end at nodes of one depth meet a stopping criterion, bool [n]."""
        scores = tuple(self.scores) if self._details.scores else None
        ask = self._row.whole(lambda input_ids: self._criteria(input_ids, scores))
        input_ids = torch.from_numpy(tree.tokens(tree.paths(nodes))).to(self._row.input_ids.device)
        met: Tensor = ask(input_ids)
        if met.shape != (len(nodes),):
            raise SpecbeamError(
                f"stopping_criteria returned values of shape {[*met.shape]} for {len(nodes)} texts: give one bool each"
            )
        return cast(NDArray[np.bool_], met.cpu().numpy())


def changed_rows(selection: Selection, request: SelectionRequest) -> Tensor:
    """The scores that a selection request makes of all logits, float32 [n, vocab]."""
    return changed(selection.logits, request, torch.from_numpy(selection.normalizers).to(selection.logits.device))


def topk(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The indices of the k highest scores of [n], int64 [k], with ties in the order of transformers' function."""
    return torch.from_numpy(scores).topk(k).indices.numpy()


@dataclass(eq=False, slots=True)
class Continued:
    """A hypothesis by the beams that its tokens continue. Several may have the same tokens by different beams.

    Attributes:
        beam: the number of the beam that the last token continues.
        before: the hypothesis without this token.
    """

    beam: int
    before: Continued | None

    @property
    def beams(self) -> list[int]:
        """The numbers of all beams, in order."""
        numbers: list[int] = []
        text: Continued | None = self
        while text is not None:
            numbers.append(text.beam)
            text = text.before
        return numbers[::-1]


class TransformersBeamSearch(BeamSearch):
    """Beam search by all rules of transformers: it ranks the scores of all tokens of all beams with ``topk``.

    The order of ``topk`` among equal scores depends on how many there are, so every beam has to be evaluated. Where
    candidates are few, forbidden ones are kept as finished hypotheses.

    Args:
        kept: gets the scores of each step. None if nobody asks for them.
    """

    top = staticmethod(topk)
    only_possible = False

    def __init__(self, *args: Any, kept: list[Tensor] | None, **options: Any):
        super().__init__(*args, **options)
        self.needs_rows = True
        self._kept = kept
        self._of_beams: list[Continued | None] = [None] * self.num_beams
        self._continued: list[int] = []  # beams, by candidate

    def beam_indices(self) -> list[list[int]]:
        """The numbers of the beams that the tokens of each hypothesis of :meth:`kept` continue."""
        kept = np.flatnonzero(self.finished.ended)[: self.num_return_sequences]
        return [cast(Continued, self.finished.texts[i]).beams for i in kept]

    def step(self, selection: Selection | None, known: Mask | None = None) -> bool:
        if selection is None or (known is not None and not known.all()):
            return False
        if self._kept is not None:
            self._kept.append(changed_rows(selection, self.selection_request(self.beams)))
        return super().step(selection, known)

    def _go_on(self, first: Continuations) -> bool:
        return False  # ``topk`` ranks the candidates once more

    def candidates_at(self, nodes: Nodes, scores: Scores) -> Candidates:
        texts: list[Hashable] = [Continued(beam, self._of_beams[beam]) for beam in self._continued]
        return replace(super().candidates_at(nodes, scores), texts=texts)

    def _survivors(self, candidates: Candidates) -> tuple[NDArray[np.int64], Scores]:
        survivors, scores = super()._survivors(candidates)
        self._of_beams = [cast(list[Continued], candidates.texts)[place] for place in survivors]
        return survivors, scores

    def _best(self, selection: Selection, rows: NDArray[np.int64]) -> Continuations:
        if selection.noise is None:
            best = self._topk(selection)
        else:
            best = super()._best(selection, rows)
            if ranks_draws():
                best = best.take(topk(best.scores, len(best.scores)))
        if not best.scores.max() < np.inf:  # inf, and NaN: transformers' -1e9 forbids nothing there
            raise SpecbeamError(
                f"logits_processor, sequence_bias or exponential_decay_length_penalty raised the score of a text to "
                f"{best.scores.max()}: with beams, keep scores finite"
            )
        self._continued = best.beams.tolist()
        return best

    def _topk(self, selection: Selection) -> Continuations:
        log_probs = selection.logits.log_softmax(-1)  # its bits are transformers', and ties depend on them
        beams = torch.from_numpy(self.scores).to(log_probs.device)[:, None]
        request = self.selection_request(self.beams)
        scores = (changed(log_probs, request, torch.zeros_like(log_probs[:, 0])) + beams).flatten()
        best, chosen = scores.topk(min(self.num_candidates, len(scores)))
        beam, token = np.divmod(chosen.cpu().numpy(), log_probs.shape[-1])
        return Continuations(beam, token, best.cpu().numpy(), log_probs.flatten()[chosen].cpu().numpy())


class ObservedStopping(Stopping):
    """Also ends sequences that meet a caller's criterion.

    Args:
        stop: without stop strings.
        met: which of the sequences that end at nodes meet a criterion, bool [n]. Beam search asks once per step.
        step: takes the step of a single sequence that ends at a node, and returns whether it meets a criterion. None
            for beams: there a call is about the reason why a hypothesis has ended.
    """

    def __init__(
        self,
        stop: Stopping,
        met: Callable[[Tree, Nodes], NDArray[np.bool_]],
        step: Callable[[Tree, int], bool] | None,
    ) -> None:
        super().__init__(stop.eos_token_ids, stop.max_length, (), None)
        self._met = met
        self._step = step

    def ended(self, tree: Tree, nodes: Nodes) -> NDArray[np.bool_]:
        return super().ended(tree, nodes) | self._met(tree, nodes)

    def __call__(self, tree: Tree, node: int) -> str | None:
        met = self._step is not None and self._step(tree, node)
        return super().__call__(tree, node) or ("stop" if met else None)

    def unchanged(self, tree: Tree, node: int) -> int:
        """0: each token is a step."""
        return 0
