"""``python -m specbeam``."""

import sys

from specbeam.cli import main

sys.exit(main())
