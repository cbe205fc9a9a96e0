"""Bytes of quantised weights: as a folder stores them, or by arithmetic."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.memory.units import show_bytes
from retrieval_attn.model.bundled import model_path
from retrieval_attn.model.checkpoint import reason
from retrieval_attn.model.quantization import GROUP, PACKAGE, options_in, weight_format

# Group-wise scales and zero points per weight, at the usual group of 32 to 128 weights.
_SCALE_BITS = 0.5


def stored_bytes(source: Any) -> int | None:
    """Bytes of the weights in a local folder, by its safetensors index or single file; None if not told."""
    if not isinstance(source, str | Path) or not Path(model_path(source)).is_dir():
        return None
    folder = Path(model_path(source))
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            total = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
            return int(total) if total else None
        except (ValueError, TypeError, AttributeError) as error:
            raise InputDataError(f"{index} is damaged ({reason(error)}); restore it, or load another model.") from error
    return single.stat().st_size if single.is_file() else None


def named_bytes(model: Any, name: str, width: int) -> tuple[int, str]:
    """Weight bytes of `model`, on the meta device, loaded with `quantization=name`, on a GPU; and what they are.

    width: bytes of a number that is not quantised. Matrices of linear layers are, but for the output's. A copy of the
    largest matrix in the model's dtype, which it is computed with, is counted. Raises ConfigError for another name.
    """
    fmt = weight_format(name)
    outputs = model.get_output_embeddings()
    size, largest, quantised = 0, 0, set()
    for module in model.modules():
        if not isinstance(module, nn.Linear) or module is outputs or id(module.weight) in quantised:
            continue
        quantised.add(id(module.weight))
        rows, columns = module.weight.shape
        filled = -(-columns // fmt.multiple) * fmt.multiple
        groups = rows * filled // GROUP * (fmt.group_numbers * width)
        size += rows * filled * fmt.bits // 8 + groups + rows * fmt.row_bytes
        largest = max(largest, rows * columns * width)
    size += sum(weight.numel() * width for weight in model.parameters() if id(weight) not in quantised)
    said = f"{name} ({PACKAGE}): linear layers at {fmt.bits} bits with their scales{copy_note(largest)}"
    return size + largest, said


def copy_note(copied: int) -> str:
    """What is said of a copy of a matrix of so many bytes, behind what is said of weights."""
    return f", and a copy of one of {show_bytes(copied)}" if copied else ""


def quantized_bytes(model: Any, quantization: Any, width: int, stored: int | None) -> tuple[int, str]:
    """Weight bytes of a model that its config says is quantised: as stored, else matrices at their bits."""
    options = options_in(quantization)
    given = options.get("quant_method") or "unnamed"
    method = str(getattr(given, "value", given)).rpartition(".")[2].lower()
    if stored is not None:
        return stored, f"{method}, as stored in the folder"
    bits = _bits_of(method, options)
    parameters = sum(weight.numel() for weight in model.parameters())
    whole = {id(model.get_input_embeddings().weight), id(getattr(model.get_output_embeddings(), "weight", None))}
    # By shape and not by module class: experts are three-axis parameters, not nn.Linear.
    linear = sum(weight.numel() for weight in model.parameters() if weight.ndim >= 2 and id(weight) not in whole)
    size = round(linear * (bits + _SCALE_BITS) / 8) + (parameters - linear) * width
    return size, f"{method}: linear layers at {bits} bits and {_SCALE_BITS} for scales (an estimate)"


def _bits_of(method: str, options: dict[str, Any]) -> int:
    if options.get("bits"):
        return int(options["bits"])
    if options.get("load_in_4bit") or method in ("mxfp4", "fp4", "nvfp4"):
        return 4
    if options.get("load_in_8bit") or "fp8" in method or "int8" in method:
        return 8
    named = [digit for digit in _bits_in_groups(options) if digit]
    if named:
        return max(named)
    raise ConfigError(
        f"plan does not know the bits per weight of quantisation {method!r}; give the folder that holds "
        "the weights, "
        "or a config without quantization_config and the dtype to count with."
    )


def _bits_in_groups(options: dict[str, Any]) -> list[int]:
    """Bits of the groups of compressed-tensors, or in the name of torchao's class (Int4WeightOnlyConfig)."""
    groups = options.get("config_groups")
    if isinstance(groups, dict):
        weights = [(group or {}).get("weights") or {} for group in groups.values() if isinstance(group, dict)]
        return [int(one.get("num_bits") or 0) for one in weights]
    kind = options.get("quant_type")
    kind = kind.get("default", {}) if isinstance(kind, dict) else kind
    name = kind.get("_type", "") if isinstance(kind, dict) else type(kind).__name__
    found = re.search(r"(\d)weight", str(name).lower())
    return [int(found[1])] if found else []
