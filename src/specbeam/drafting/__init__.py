"""Drafters propose draft tokens, so that the target can verify many tokens in one forward pass."""

from specbeam.decoding.drafter import SKIPPED as SKIPPED
from specbeam.decoding.drafter import Drafter as Drafter
from specbeam.decoding.drafter import DraftTokens as DraftTokens
from specbeam.decoding.drafter import Proposal as Proposal
