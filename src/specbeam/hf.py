"""specbeam inside transformers; the public name of :mod:`specbeam.integrations.transformers`."""

from specbeam.integrations.transformers import generate as generate
from specbeam.integrations.transformers import wrap as wrap
