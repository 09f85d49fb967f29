"""The engine: requests, their scheduling, their memory, and what passes cost."""

from specbeam.engine.engine import Engine as Engine
