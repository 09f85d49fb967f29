"""What the weights of a folder are quantized with. Only GGUF's and CTranslate2's quantizations are read here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbeam.checkpoints.files import read_json
from specbeam.errors import SpecbeamError, Unsupported

OF_MODELOPT, OF_AWQ = "hf_quant_config.json", "quant_config.json"
"""Files in which NVIDIA's ModelOpt and AutoAWQ describe a quantization. AutoAWQ's are of 2023."""


def quantization_of(folder: Path, config: Mapping[str, Any], dtypes: Mapping[str, str]) -> str | None:
    """The name of a folder's quantization; None for weights that are not quantized.

    Args:
        config: the content of config.json.
        dtypes: of the tensors, by their names.
    """
    how = config.get("quantization_config") or config.get("compression_config")
    if isinstance(how, dict) and (name := _stated(how)):
        return name
    if isinstance(config.get("quantization"), dict):
        return "MLX"
    by_modelopt = read_json(folder, OF_MODELOPT).get("quantization")
    if isinstance(by_modelopt, dict) and (name := _stated(by_modelopt)):
        return name
    if name := _by_tensors(folder, dtypes):
        return name
    return None if config.get("quantization_config") is None else "a method it does not name"


def check_not_quantized(folder: Path, config: Mapping[str, Any], dtypes: Mapping[str, str]) -> None:
    """Refuse a quantized folder. Arguments as for :func:`quantization_of`.

    Raises:
        Unsupported: transformers may know the quantization.
        SpecbeamError: config.json does not describe it as transformers needs it.
    """
    if name := quantization_of(folder, config, dtypes):
        how = config.get("quantization_config")
        is_described = isinstance(how, dict) and ("quant_method" in how or _loads_in_bits(how))
        kind = Unsupported if is_described else SpecbeamError
        raise kind(f"{folder} is quantized with {name}: load an unquantized folder or a GGUF file")


def _stated(how: Mapping[str, Any]) -> str | None:
    """The method that a description names, or that has its keys."""
    detail = how.get("quant_algo") or how.get("format")
    if method := how.get("quant_method"):
        return f"{method} ({detail})" if detail else str(method)
    if _loads_in_bits(how):
        return "bitsandbytes"
    if detail:
        return str(detail)
    return "MLX" if {"bits", "group_size"} <= how.keys() else None


def _loads_in_bits(how: Mapping[str, Any]) -> bool:
    return bool(how.get("load_in_4bit") or how.get("load_in_8bit"))


def _by_tensors(folder: Path, dtypes: Mapping[str, str]) -> str | None:
    """The method whose tensors lie beside the weights, or in place of them."""
    ends = {name.rpartition(".")[2] for name in dtypes}
    if "qweight" in ends:
        return "AWQ" if (folder / OF_AWQ).is_file() else "GPTQ"
    if {"scales", "biases"} <= ends:
        return "MLX"
    if ends & {"absmax", "SCB"}:
        return "bitsandbytes"
    if "weight_packed" in ends:
        return "compressed-tensors"
    if "weight_scale_2" in ends:
        return "NVFP4"
    if ends & {"weight_scale", "weight_scale_inv", "scale_weight"}:
        return "fp8 and scales" if any(kind.startswith("F8") for kind in dtypes.values()) else "int8 and scales"
    return None
