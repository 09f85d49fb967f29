"""When drafting is tried again after it did not pay."""

from __future__ import annotations

from enum import Enum, auto

MIN_REST_ROUNDS, MAX_REST_ROUNDS = 8, 128
"""Wait this many rounds before retrying; double after each failure, up to the cap."""
MIN_GAIN_IF_ALL_ACCEPTED = 1.25
"""Retry only if rounds would be this many times as fast with every guess accepted."""
MAX_RETRY_COST_SHARE = 0.25
"""A retry may cost this share of the time that the rounds of rest could have saved with every guess accepted."""


class Phase(Enum):
    """How a request uses its drafter in a round."""

    DRAFTING = auto()
    """Sizes follow the evidence. A round for which the best size is no draft begins a rest."""
    RESTING = auto()
    """No drafts."""
    PROBING = auto()
    """The smallest draft, because costs and texts change."""


class RetryPolicy:
    """Rests after rounds in which drafting did not pay, then probes, ever more rarely.

    Attributes:
        phase: of this round.
    """

    def __init__(self) -> None:
        self.phase = Phase.DRAFTING
        self._rested_rounds = 0
        self._rest_rounds = MIN_REST_ROUNDS

    @property
    def is_due(self) -> bool:
        """Whether the rest has been long enough to consider a retry."""
        return self.phase is not Phase.DRAFTING and self._rested_rounds >= self._rest_rounds

    def consider(self, plain_cost: float, best_cost: float, probe_cost: float) -> None:
        """Choose the phase of a round in which a retry is due.

        Args:
            plain_cost: of a token, or of a step of beam search, without drafts.
            best_cost: the same with drafts of the best size, if every guess is accepted.
            probe_cost: added to the cost of a round by a probe.
        """
        if best_cost * MIN_GAIN_IF_ALL_ACCEPTED > plain_cost:
            self.resume()
            return
        affordable = int(probe_cost / (MAX_RETRY_COST_SHARE * (plain_cost - best_cost)))
        self._rest_rounds = max(self._rest_rounds, affordable)
        self.phase = Phase.RESTING if self._rested_rounds < self._rest_rounds else Phase.PROBING

    def rest(self) -> None:
        """Take in that a round had no draft because none would have paid."""
        self.phase = Phase.RESTING
        self._rested_rounds += 1

    def drafted(self, accepted: bool) -> None:
        """Take in that a round had guesses, and whether one was accepted."""
        if self.phase is Phase.PROBING:
            self._rest_rounds = MIN_REST_ROUNDS if accepted else min(2 * self._rest_rounds, MAX_REST_ROUNDS)
        self.resume()

    def resume(self) -> None:
        """Let sizes follow the evidence again."""
        self.phase = Phase.DRAFTING
        self._rested_rounds = 0
