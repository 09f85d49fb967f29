"""The engine: requests, their scheduling, their memory, and the costs of passes."""

from specbeam.engine.engine import Engine as Engine
from specbeam.engine.request import Request as Request
from specbeam.engine.setup import Setup as Setup
