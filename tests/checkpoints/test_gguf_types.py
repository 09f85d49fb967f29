"""The types of GGUF files have the names, sizes and values of the gguf package."""

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from specbeam.checkpoints.formats.gguf_types import MIXTURES, TYPES, dequantize

BLOCKS = 1024


def test_types_have_the_numbers_names_and_sizes_of_gguf():
    theirs = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    assert {number: (kind.name, kind.size, kind.bytes) for number, kind in TYPES.items()} == theirs


def test_mixtures_have_the_names_of_gguf():
    theirs = {int(kind): kind.name.split("_", 1)[1] for kind in LlamaFileType if kind < 1024}
    assert {number: name for number, name in enumerate(MIXTURES) if name} == theirs | {0: "F32"}


@pytest.mark.parametrize("number", TYPES)
def test_values_equal_those_of_gguf_bit_for_bit(number):
    kind, theirs = TYPES[number], GGMLQuantizationType(number)
    raw = np.random.default_rng(number).integers(0, 256, (8, BLOCKS // 8 * kind.bytes), np.uint8)
    try:
        with np.errstate(invalid="ignore", over="ignore"):
            expected = quants.dequantize(raw, theirs)
    except NotImplementedError:
        with pytest.raises(NotImplementedError, match=kind.name):
            dequantize(raw, kind)
        return
    with np.errstate(invalid="ignore", over="ignore"):
        values = dequantize(raw, kind)
    assert values.shape == expected.shape
    assert values.dtype == np.float32
    is_nan = np.isnan(expected)  # the bits of a NaN's payload may differ
    assert np.array_equal(np.isnan(values), is_nan)
    assert np.array_equal(values.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])
