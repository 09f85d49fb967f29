"""specbeam inside transformers; the public name of :mod:`specbeam.integrations.transformers`."""
# ruff: noqa: E402

from specbeam.system.extras import require_for

require_for(__name__)

from specbeam.integrations.transformers import generate as generate
from specbeam.integrations.transformers import wrap as wrap
