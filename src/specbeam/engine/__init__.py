"""The engine: requests, their scheduling, their memory, and the costs of passes."""

from specbeam.decoding.setup import Setup as Setup
from specbeam.engine.costs import Costs as Costs
from specbeam.engine.costs import CostTable as CostTable
from specbeam.engine.engine import Engine as Engine
from specbeam.engine.request import Request as Request
