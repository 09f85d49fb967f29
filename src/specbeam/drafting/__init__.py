"""Drafters guess how a text goes on, so that the target can check many guesses in one pass."""

from specbeam.decoding.drafter import SKIPPED as SKIPPED
from specbeam.decoding.drafter import Drafter as Drafter
from specbeam.decoding.drafter import DraftTokens as DraftTokens
from specbeam.decoding.drafter import Proposal as Proposal
