"""The choice of a device."""

import pytest
import torch

from specbeam import SpecbeamError
from specbeam.backends.devices import choose_device


@pytest.mark.parametrize("name", ["mps", "cuda:99", "meta", "gpu", ""])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name):
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(SpecbeamError) as raised:
        choose_device(name)
    message = str(raised.value)
    assert message.startswith(f"there is no device {name!r} here: give auto, or one of cpu")
    assert len(message) < 100 + 8 * torch.cuda.device_count()
