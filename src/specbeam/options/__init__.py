"""The options of a request: what the caller asks for, what a checkpoint recommends, and their names elsewhere."""

from specbeam.options.options import Options as Options
