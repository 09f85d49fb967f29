"""Drafters guess how a text goes on, so that the target can check many guesses in one pass."""

from specbeam.decoding.drafter import DECLINED as DECLINED
from specbeam.decoding.drafter import Drafter as Drafter
from specbeam.decoding.drafter import Guesses as Guesses
from specbeam.decoding.drafter import Proposal as Proposal
