"""The engine's state of a request: its strategy, its slots, and the nodes that are still to be evaluated."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import Encoder, TreeBatch
from specbeam.cache.budget import Budget
from specbeam.core.selection import MASKED, Logits, Selection, SelectionRequest, one_after_another
from specbeam.core.strategy import DeadEnd, Evaluate, Hypothesis, Strategy
from specbeam.core.tree import NO_NODES, Nodes
from specbeam.decoding.setup import MakeStrategy
from specbeam.decoding.strategies import make_strategy
from specbeam.drafting.forced import MAX_FORCED_TOKENS
from specbeam.drafting.policy import SharedCost
from specbeam.engine.clients import Clients
from specbeam.engine.costs import Costs
from specbeam.engine.custom_strategy import CustomStrategy
from specbeam.engine.drafts import Draft, make_drafter
from specbeam.engine.model_state import ModelState
from specbeam.engine.output import Output
from specbeam.engine.request import Request
from specbeam.engine.setup import make_setup
from specbeam.engine.shared_source import SharedSource
from specbeam.errors import NotFinite, SpecbeamError, TooManyNodes, forget_frames, is_out_of_memory
from specbeam.models.model import LanguageModel
from specbeam.options.options import Options
from specbeam.recording.log_probs import NodeLogProbs
from specbeam.recording.receipts import inputs_of

MAX_HELD = 8
"""The strategy of a sequence that goes ahead takes its steps after at most this many passes."""
Join = Callable[[list[Logits]], Logits]
""":meth:`specbeam.backends.contract.Backend.join`"""


class RequestState:
    """One request, as the engine works on it.

    Attributes:
        request: the caller's handle.
        number: the engine numbers requests in the order of submission.
        overtaken: how many later requests have started while it waited.
        last_turn: when it last took part in a pass. Requests with lower numbers come first.
        priority: lower ones start first.
        deadline: when it is to end with the text so far, in seconds of ``time.monotonic``.
        step: what the strategy asked for last.
        model: its state on the model that is to evaluate the pending nodes.
        pending: nodes still to be evaluated, ancestors first, int64 [n].
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompt_ids: list[int],
        options: Options,
        draft: Draft | None = None,
        strategy: MakeStrategy | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        source: Any = None,
        features: SharedSource | None = None,
        writes: bool = True,
        clients: Clients[RequestState],
        budget: Budget,
        costs: Costs,
    ) -> None:
        self.number = self.overtaken = self.last_turn = 0
        self.priority = priority
        self.deadline = math.inf if timeout is None else time.monotonic() + timeout
        self.pending = NO_NODES
        self._lm = lm
        self._setup = setup = make_setup(lm, prompt_ids, options, costs, writes)
        self.request = Request(prompt_ids, setup.stop.max_length, self, clients)
        name = f"strategy {strategy.name}" if isinstance(strategy, CustomStrategy) else "strategy"
        of_caller = ((name, strategy), ("source", source), ("features", features))
        objects = [name for name, value in of_caller if value is not None]
        inputs = inputs_of(lm, prompt_ids, setup.options, setup.stop.eos_token_ids, setup.selector.seed, objects)
        self._output = Output(lm, setup, self.request, inputs)
        num_texts = setup.options.num_texts
        self._draft_cost = SharedCost(costs(draft.backend).expected) if isinstance(draft, LanguageModel) else None
        shared = SharedSource(np.array(prompt_ids, np.int64)) if lm.backend.encoder_reads == "tokens" else features
        self._drafter = None
        draft_tokens = 0
        if draft is not None:
            max_rows = max(0, budget.max_rows - num_texts)  # for draft tokens
            unread = 0
            if isinstance(draft, LanguageModel):
                unread = setup.tree.prompt_length
                if shared is not None:
                    reader = lm.backend if source is None else None
                    unread += shared.unread_positions(cast(Encoder, draft.backend), reader)
            self._drafter = make_drafter(setup, lm, draft, unread, self._draft_cost, max_rows)
            draft_tokens = self._drafter.controller.max_draft_tokens
        if setup.options.constraint is not None:
            draft_tokens = max(draft_tokens, MAX_FORCED_TOKENS)
        rows = num_texts + draft_tokens
        self._target = ModelState(budget, setup, lm.backend, setup.tree, draft_tokens, rows, shared, source)
        self._states = [self._target]
        self._draft = None
        if isinstance(draft, LanguageModel) and self._drafter is not None:
            drafted, rows = self._drafter.controller.max_drafted, self._drafter.controller.max_drafted_at_once
            tree = self._drafter.tree
            read = None if draft.backend.target is None else self._target
            self._draft = ModelState(budget, setup, draft.backend, tree, drafted, rows, shared, read=read)
            self._states.append(self._draft)
        self._trees = [*{state.tree for state in self._states}]
        self.model = self._target
        self._make_strategy = strategy or make_strategy
        self._strategy: Strategy | None = None
        self._rows = WantedRows(NO_NODES)
        self.step = Evaluate(NO_NODES)
        self._was_recomputed = False  # because logits were not finite
        self._held: list[Selection] = []  # of passes whose tokens the strategy has not seen yet

    @property
    def max_rows(self) -> int:
        """The maximum number of nodes whose logits it needs at once."""
        return max(state.max_rows for state in self._states)

    @property
    def source_bytes(self) -> int:
        """Bytes that encoders' outputs take."""
        return sum(state.source_bytes for state in self._states)

    @property
    def probe_bytes(self) -> int:
        """Bytes of the scores of attention that its strategy asks for."""
        return 0 if self.step.probe is None else self.step.probe.scores.nbytes

    @property
    def min_bytes(self) -> int:
        """Bytes that it needs for one sequence of full length, without a draft."""
        return self._target.min_bytes + self._target.source_bytes

    @property
    def next_bytes(self) -> int:
        """Bytes that it needs for one more iteration, beside the bytes that it holds."""
        return sum(state.next_bytes(self.pending if state is self.model else NO_NODES) for state in self._states)

    def shareable_bytes(self) -> int:
        """Bytes of slots that live requests hold, and that it would share if it began now."""
        return sum(state.slots.shareable_bytes() for state in self._states)

    def growth_bytes(self, nodes: Nodes, ahead: int = 0) -> int:
        """Bytes that a pass over some of its pending nodes takes, and further passes, beside what it holds."""
        return self.model.growth_bytes(nodes, self.pending[len(nodes) :], ahead)

    @property
    def used_slots(self) -> int:
        """Slots in use on the target."""
        return self._target.used

    @property
    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self.request.done

    def open(self) -> None:
        """Begin the strategy or, after a preemption, recompute the nodes that it needs."""
        with self._failing_alone():
            if self._strategy is None:
                self._strategy = self._make_strategy(self._setup, self._drafter)
                self._advance(None)
            else:
                self._rows.restart()
                self._evaluate(self._rows.ascending)

    def preempt(self) -> None:
        """Free all slots until :meth:`open`."""
        with self._failing_alone():
            self._catch_up()
            if self.step.drafting and self.model.read is not None:  # it would find no features of the target
                self._advance(no_tokens(self.step))
        for state in self._states:
            state.close()

    def await_prefix(self, others: list[RequestState]) -> bool:
        """Wait for another live request that is about to prefill the same tokens, then share their slots.

        Args:
            others: requests that began before this one.

        Returns:
            Whether to wait.
        """
        with self._failing_alone():
            trees = (state.slots for one in others for state in one._states if state.backend is self.model.backend)
            if self.model.slots.await_prefix(trees):
                return True
            self._evaluate(self._rows.part)
        return False

    def end_early(self, finish_reason: str) -> None:
        """Make the text so far the result, unless the request is done."""
        tree = self._setup.tree
        with self._failing_alone():
            self._catch_up()
            if not self.done:
                self._finish([Hypothesis(tree.tip, float(tree.scores(tree.tip)), finish_reason)])

    def max_ahead(self, nodes: Nodes) -> int:
        """How many further passes its backend may run by itself after one over some pending nodes.

        Each is over the tokens that the one before chose.
        """
        are_all = len(nodes) == len(self.pending) == len(self._rows.ascending)
        if not (self._held or (are_all and self._rows.in_order and self._rows.is_whole)):
            return 0
        return min(self.step.ahead - len(self._held), self.model.slots.max_ahead(nodes))

    def tree_batch(self, nodes: Nodes, ahead: int = 0) -> TreeBatch:
        """The request's part of a pass over some of its pending nodes, or of ``ahead`` more passes."""
        no_ancestors = self._held or (len(nodes) == len(self.pending) == len(self._rows.part) and self._rows.is_whole)
        wanted = np.arange(len(nodes)) if no_ancestors else self._rows.among(nodes)
        request, state = self.step.selection_request, self.model
        vocab = None if request is None else request.vocab
        token = self._held[-1].tokens[:, 0] if self._held else None
        rest = self.pending[len(nodes) :]
        segment = state.slots.tree_batch(nodes, wanted, vocab, state.source, ahead, token, rest)
        segment.probe, segment.features = self.step.probe, state.features(nodes)
        return segment

    def spend(self, seconds: float, other_nodes: int, requests: int) -> None:
        """Count the time of a pass, and expect the next one to be as full.

        Args:
            seconds: the request's share of the pass's time.
            other_nodes: the nodes that other requests are expected to bring to the next pass.
            requests: the number of requests in the pass.
        """
        self.model.seconds += seconds
        for cost in [self._draft_cost] if self.step.drafting else [self._setup.cost, self._setup.plain_cost]:
            if cost is not None:
                cost.join(other_nodes, requests)

    def selection_requests(self, nodes: Nodes) -> list[SelectionRequest]:
        """The selection requests about the logits at the wanted ones among some pending nodes.

        Empty as long as others are pending, or if the strategy wants the rows in another order than they come in.
        """
        is_last = self._held or (len(nodes) == len(self.pending) and self._rows.in_order and self._rows.is_whole)
        return self._selection_requests() if is_last else []

    def is_finite(self, logits: Logits, rows: slice, selections: list[Selection]) -> bool:
        """Whether it can go on with its rows of logits, or with the selections from them.

        No result depends on the logits of a draft model.
        """
        if self.step.drafting or self.step.any_logits:
            return True
        if selections:
            return selections[0].finite
        return rows.start == rows.stop or self._sums(logits, rows).finite

    def _sums(self, logits: Logits, rows: slice) -> Selection:
        """A selection of no tokens. It tells which rows are finite."""
        (found,) = self.model.backend.choose(logits, [(rows, SelectionRequest(top=0))])
        return found

    def receive(self, nodes: Nodes, logits: Logits, rows: slice, selections: list[Selection], ahead: int = 0) -> None:
        """Take the logits of a pass over some pending nodes. After the last of these, let the strategy go on.

        Args:
            logits: of a whole pass, [n, vocab].
            rows: of the wanted ones among these nodes.
            selections: for the :meth:`selection_requests` about these logits.
            ahead: how many further passes the backend has run by itself. The selections have rows for each of them.
        """
        with self._failing_alone():
            self.pending = self.pending[len(nodes) :]
            self.model.evaluated(nodes, self.pending, ahead)
            backend = self.model.backend
            if len(self.pending) or not (self._held or self._rows.is_last_part):
                self._rows.add(logits[rows], backend.join)
                if not len(self.pending):
                    self._evaluate(self._rows.rest)
                return
            self.model.completed += 1 + ahead
            if selections and not ahead and self._holds(nodes, selections[0]):
                return
            if not selections:
                logits = self._rows.complete(logits[rows], backend.join)
                rows = slice(0, len(logits))
                if requests := self._selection_requests():
                    selections = backend.choose(logits, [(rows, one) for one in requests])
            for log_probs, _ in reversed(self._node_log_probs()):
                log_probs.add(self._rows.nodes, selections.pop())
            self._advance(self._selection(selections[0]) if selections else backend.array(logits))

    def _holds(self, nodes: Nodes, selection: Selection) -> bool:
        """Evaluate the chosen token next, before the strategy has seen it, if the strategy allows that.

        Its node gets the next number in the tree. The strategy adds it later, when it takes the selections together.
        """
        held, tree = self._held, self._setup.tree
        if min(self.step.ahead, MAX_HELD) <= len(held) or self.step.beams is not None:
            return False
        if not held and (nodes[-1] < tree.prompt_length or nodes[-1] != tree.prefix[-1]):
            return False  # a reader waits for the first token, and a node below another branch would get another number
        if int(selection.tokens[0, 0]) in self.step.ends or not selection.scores[0, 0] > MASKED:
            return False
        selection.sources = ()  # no logits outlive their pass
        held.append(selection)
        self.pending = np.array([len(tree) + len(held) - 1])
        if self.request.is_read:
            self._output.show(held)
        return True

    def _catch_up(self) -> None:
        """Let the strategy take the selections that were held."""
        if self._held:
            self._advance(one_after_another(self._taken()))

    def _taken(self, *last: Selection) -> list[Selection]:
        """The selections that were held, and a last one. None is held any more."""
        held, self._held = [*self._held, *last], []
        return held

    def refuse(self, nodes: Nodes, logits: Logits, rows: slice, selections: list[Selection]) -> None:
        """Handle logits that are not finite, of a pass over no other tree.

        The first time, recompute the whole cache. After that let the strategy ask for other nodes, or end the request.
        Arguments are as for :meth:`receive`.
        """
        with self._failing_alone():
            was_recomputed, self._was_recomputed = self._was_recomputed and not self._held, True
            problem = None if self._held else self._not_finite(nodes, logits, rows, selections)
            self.model.lose(len(nodes))
            self._catch_up()
            self._rows.restart()
            if was_recomputed:
                self._advance(problem)
            else:
                self._evaluate(self._rows.ascending)

    def _not_finite(self, nodes: Nodes, logits: Logits, rows: slice, selections: list[Selection]) -> NotFinite:
        wanted = nodes[self._rows.among(nodes)]
        found = selections[0] if selections else self._sums(logits, rows)
        passes, row = divmod(int(np.flatnonzero(~np.isfinite(found.normalizers))[0]), len(wanted))
        there = self.model.backend.array(found.logits[row : row + 1])  # a backend that goes ahead stops there
        length = int(self._setup.tree.depths(wanted[row])) + 1 + passes
        return not_finite(self._lm.source, length, there)

    def _selection_requests(self) -> list[SelectionRequest]:
        """The strategy's selection request, if it has one, then the requests for per-node log-probabilities."""
        requests = []
        if (own := self.step.selection_request) is not None:
            requests.append(SelectionRequest(top=0, vocab=own.vocab) if own.functions else own.after(len(self._held)))
        requests += [request for _, request in self._node_log_probs()]
        return requests

    def _node_log_probs(self) -> list[tuple[NodeLogProbs[Any], SelectionRequest]]:
        """The per-node log-probabilities of the step, and the selection requests for them."""
        if self.step.drafting:
            return []
        own = self.step.selection_request
        requests = ((one, one.selection_request(own)) for one in self._output.node_log_probs)
        return [(one, request) for one, request in requests if request is not None]

    def _selection(self, selection: Selection) -> Selection:
        """The selection for the strategy. A caller's functions run here: they get all scores, and may fail."""
        if self._held:
            return one_after_another(self._taken(selection))
        if (own := self.step.selection_request) is None or not own.functions:
            return selection
        (found,) = self.model.backend.choose(selection.logits, [(slice(0, len(selection.tokens)), own)])
        return found

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        if is_out_of_memory(error):
            error = out_of_memory(len(self._setup.tree))
        self.request.outcome = forget_frames(error)
        self._release()

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """An error in here ends this request, and no other."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def make_do(self, budget: Budget) -> None:
        """Shrink the only live request until it fits into memory.

        Free the draft model's cache, then drop draft tokens and deferred levels. Where the nodes of a plain step do
        not fit together, evaluate them in parts.
        """
        with self._failing_alone():
            self._catch_up()
            if self._draft is not None and self._draft in self._states:
                self._draft.close()
                self._states.remove(self._draft)
            if not self.done and (self.step.drafting or self.step.or_fewer):
                self._advance(budget.too_small)
            if not self.done:
                self._take_part(budget)

    def _take_part(self, budget: Budget) -> None:
        """Evaluate as many of the nodes as fit into memory together with their ancestors; the rest comes afterwards.

        All other nodes lose their slots, so the next part may need some ancestors recomputed. One node always fits: the
        engine has memory for a sequence of full length.

        Each pass evaluates pending nodes. Ancestors become pending again only here, or after the rows of a part have
        come. Since the last call, rows have come, or the part is smaller. So a step ends, or fails, after finitely many
        passes.
        """
        slots, part = self._target.slots, self._rows.rest[: self._rows.most]
        while len(part):
            slots.keep(part)
            self._evaluate(part)
            # In several passes, each node may need a row for a while.
            if len(part) == 1 or budget.holds(self._target.growth_bytes(self.pending, rest=self.pending)):
                break
            part = part[: len(part) // 2]
        self._rows.most = len(part) // 2
        if not len(part) or not budget.holds(self.growth_bytes(self.pending[: budget.max_batch_tokens])):
            # One node alone did not fit, or the next pass would come back here.
            of_source = self._target.used - slots.used
            own = slots.held_bytes + of_source * self._target.backend.slot_bytes + self.source_bytes
            raise budget.too_small if budget.held == own else budget.lost(own)

    def _advance(self, selection: Selection | NDArray[np.float32] | TooManyNodes | NotFinite | None) -> None:
        """Let the strategy take a selection and name the next nodes, or finish."""
        assert self._strategy is not None
        try:
            step = (
                self._strategy.throw(selection)
                if isinstance(selection, SpecbeamError)
                else self._strategy.send(selection)
            )
            while isinstance(step, Hypothesis) or (step.drafting and self._draft not in self._states):
                if isinstance(step, Hypothesis):
                    self._output.find(step)
                    step = next(self._strategy)
                else:
                    step = self._strategy.throw(TooManyNodes("the draft model has no memory any more: leave it out"))
        except StopIteration as finished:
            self._finish(finished.value)
            return
        except DeadEnd:
            self._finish([])
            return
        finally:
            if isinstance(selection, Selection):
                selection.sources = ()  # strategies may remember selections, but no logits
        self._release_dropped()
        if self._draft is not None and not step.drafting:
            self._draft.forget_drafted()
        self.model = self._states[1] if step.drafting else self._target
        self.step = step
        self._rows = WantedRows(step.nodes)
        self._evaluate(self._rows.ascending)
        self._output.stream(self._target, self._draft)

    def _evaluate(self, part: Nodes) -> None:
        """Make some of the strategy's nodes pending, with their ancestors that have no slot."""
        self._rows.part, self.pending = part, self.model.slots.prepare(part)

    def _release_dropped(self) -> None:
        """Take back the slots of nodes that no sequence needs any more."""
        for tree in self._trees:
            if len(dropped := tree.take_dropped()):
                for state in self._states:
                    if state.tree is tree:
                        state.slots.free(dropped)

    def _finish(self, hypotheses: list[Hypothesis]) -> None:
        """Hand out the result, and cache the best sequence for requests that begin with it."""
        self._output.finish(hypotheses, self._target, self._draft, drafted=self._drafter is not None)
        for state in self._states:
            tree, end = state.tree, hypotheses[0].node
            if tree is not self._setup.tree:
                end = int(tree.kept[tree.depths(tree.kept).argmax()])
            pending = self.pending if state is self.model else NO_NODES
            path = tree.path(end)
            state.slots.add_prefix(path[~np.isin(path, pending)])
        self._release()

    def _release(self) -> None:
        """Let go of all memory but the result."""
        self.request.end()
        for state in self._states:
            state.close()
        self.pending = NO_NODES
        self._held = []
        self._rows.restart()
        self._strategy = None
        self._drafter = None


class WantedRows:
    """The nodes at which a strategy wants logits, and the rows that have come.

    Rows come in the ascending order of their nodes. Where memory is short, the nodes are evaluated in parts.

    Attributes:
        nodes: in the strategy's order, int64 [n]. They may repeat.
        ascending: each of them once, int64 [m].
        in_order: whether both are the same.
        part: the nodes that are evaluated now, int64 [p].
        most: the maximum number of nodes of a part. Less than all after a part that did not fit, until rows come.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = np.asarray(nodes, dtype=np.int64)
        given = self.nodes.tolist()
        ascending = sorted({*given})
        self.in_order = given == ascending
        self.ascending = self.part = self.nodes if self.in_order else np.array(ascending, dtype=np.int64)
        self._received: list[Logits] = []
        self.most = len(self.ascending)

    def restart(self) -> None:
        """Drop the rows that have come."""
        self._received = []
        self.most = len(self.ascending)

    @property
    def rest(self) -> Nodes:
        """The nodes whose rows have not come."""
        return self.ascending[sum(map(len, self._received)) :]

    @property
    def is_whole(self) -> bool:
        """Whether the part is all nodes."""
        return not self._received and len(self.part) == len(self.ascending)

    @property
    def is_last_part(self) -> bool:
        """Whether no node comes after the part."""
        return bool(self.part[-1] == self.ascending[-1])

    def among(self, nodes: Nodes) -> NDArray[np.int64]:
        """The indices of the part's nodes among some nodes of a pass, ascending."""
        first, end = self.part.searchsorted((nodes[0], nodes[-1] + 1))
        return nodes.searchsorted(self.part[first:end])

    def add(self, logits: Logits, join: Join) -> None:
        """Take some rows, [k, vocab]. The others come later."""
        if len(logits):  # a view would keep the logits of the whole pass
            self._received.append(join([logits]))
            self.most = len(self.ascending)

    def complete(self, logits: Logits, join: Join) -> Logits:
        """The rows in the strategy's order, [n, vocab], with the last ones that have come."""
        logits = join([*self._received, logits]) if self._received else logits
        self._received = []
        if self.in_order:
            return logits
        return join([logits[row : row + 1] for row in self.ascending.searchsorted(self.nodes).tolist()])


def no_tokens(step: Evaluate) -> Selection:
    """A selection at nodes of which none has a token that may follow."""
    assert step.selection_request is not None
    nodes, request = len(step.nodes), step.selection_request
    tokens, scores = np.zeros((nodes, request.top), np.int64), np.full((nodes, request.top), -np.inf, np.float32)
    noise = None if request.noise is None else np.zeros(scores.shape)
    sums = np.zeros(nodes, np.float32)
    return Selection(tokens, scores, scores, sums, noise, None, sums if request.total else None, ())


def out_of_memory(nodes: int) -> SpecbeamError:
    """There was no memory for a request alone, with this many nodes in its tree."""
    return SpecbeamError(
        f"out of memory with {nodes} nodes in the request's tree: ask for fewer new tokens, a shorter prompt, or a "
        "smaller dtype"
    )


def not_finite(source: str, length: int, logits: NDArray[np.float32]) -> NotFinite:
    """The logits of a node, float32 [1, vocab], are not finite, after this many tokens."""
    found = "NaN" if np.isnan(logits).any() else "+inf" if logits.max() > 0 else "-inf alone"
    return NotFinite(
        f"no token has a probability after {length} tokens, because the logits of {source} hold {found}: "
        "check its weights, or give dtype='float32' if numbers overflow",
        option="dtype",
    )
