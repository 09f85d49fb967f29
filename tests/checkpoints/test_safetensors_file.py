"""Rows and columns of tensors, as PyTorch reads them from the same files."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specbeam import SpecbeamError
from specbeam.checkpoints.formats.safetensors_file import FLOATS, tensors_of

TYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn},
}


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_number_of_a_type_is_read_as_pytorch_converts_it(tmp_path, dtype):
    kind, bits = TYPES[dtype], {1: 8, 2: 16}.get(TYPES[dtype].itemsize)
    if bits:  # all numbers there are
        matrix = torch.arange(2**bits, dtype=torch.int32).to([torch.uint8, torch.uint16][bits // 16]).view(kind)
    else:
        whole = torch.randint(-(2**31), 2**31 - 1, (4096, kind.itemsize // 4), dtype=torch.int32)
        matrix = whole.view(kind).reshape(-1)
    matrix = matrix.reshape(-1, 16)
    save_file({"other": torch.zeros(3), "m": matrix, "v": matrix[:, 0].contiguous()}, tmp_path / "f.safetensors")
    tensors = tensors_of(tmp_path / "f.safetensors")
    expected = matrix.float().numpy()
    assert tensors["m"].shape == expected.shape
    np.testing.assert_array_equal(tensors["m"].rows(0, len(expected)), expected)
    np.testing.assert_array_equal(tensors["m"].rows(3, 7), expected[3:7])
    np.testing.assert_array_equal(tensors["m"].columns(5, 9), expected[:, 5:9])
    np.testing.assert_array_equal(tensors["v"].rows(2, 11), expected[2:11, 0])


@pytest.mark.parametrize("read", ["rows", "columns"])
def test_a_file_that_is_cut_or_removed_after_it_was_opened(tmp_path, read):
    file = tmp_path / "f.safetensors"
    save_file({"m": torch.ones(64, 64)}, file)
    tensor = tensors_of(file)["m"]
    file.write_bytes(file.read_bytes()[:-100])
    for change in (lambda: None, file.unlink):
        change()
        with pytest.raises(SpecbeamError, match="has changed since it was opened"):
            getattr(tensor, read)(0, 64)
