"""``python -m specbeam.lm_eval``; the public name of :mod:`specbeam.integrations.lm_eval`."""

from specbeam.integrations.lm_eval import SpecbeamLM as SpecbeamLM
from specbeam.integrations.lm_eval import main as main

if __name__ == "__main__":
    raise SystemExit(main())
