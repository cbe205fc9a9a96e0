"""Bytes of a built model that its config does not tell: quantised weights, rotary tables, states of a chunk."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.gpu.expert_blocks import BlockLayout
from retrieval_attn.gpu.packed_experts import can_pack, packed_bytes
from retrieval_attn.memory.routed import RoutedExperts
from retrieval_attn.memory.units import show_bytes
from retrieval_attn.model.bundled import model_path
from retrieval_attn.model.checkpoint import reason
from retrieval_attn.model.expert_loading import FLOAT_GROUP, FLOATS, reads_floats
from retrieval_attn.model.experts import copied_bytes, expert_parameters, matrix_shape
from retrieval_attn.model.gguf.blocks import block_names
from retrieval_attn.model.gguf.file import read, resolve
from retrieval_attn.model.grouped_loading import LIBRARY
from retrieval_attn.model.layers import decoder_parts, expert_counts
from retrieval_attn.model.quantization import GROUP, PACKAGE, options_in, weight_format

# Group-wise scales and zero points per weight, at the usual group of 32 to 128 weights.
_SCALE_BITS = 0.5


def stored_bytes(source: Any) -> int | None:
    """Return bytes of the weights in a local folder, by its safetensors index or single file; None: unknown."""
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


def unpacked_note(source: Any) -> str:
    """Return the text about formats of a GGUF file whose weights are unpacked when they are loaded; "" for others."""
    path = resolve(model_path(source), download=False) if isinstance(source, str | Path) else None
    return "" if path is None else f", unpacked from {', '.join(block_names(read(path)))}"


def named_bytes(model: Any, name: str, width: int) -> tuple[int, str]:
    """Return GPU bytes of `model` (built on the meta device) if loaded with `quantization=name`, and a description.

    width: bytes of a number that is not quantised. Matrices of linear layers are, but for the output's; "int4"
    quantizes experts too. A copy of the largest matrix in the model's dtype, which it is computed with, is counted.
    Raises ConfigError for another name.
    """
    fmt = weight_format(name)
    outputs = model.get_output_embeddings()
    size, largest, quantised, routed = 0, 0, set(), 0
    for module in model.modules():
        for own in (expert_parameters(module) if name == "int4" else None) or ():
            quantised.add(id(getattr(module, own)))
            size, routed = size + packed_bytes(matrix_shape(module, own), GROUP), routed + 1
            largest = max(largest, copied_bytes(module, width))
        if not isinstance(module, nn.Linear) or module is outputs or id(module.weight) in quantised:
            continue
        quantised.add(id(module.weight))
        rows, columns = module.weight.shape
        filled = -(-columns // fmt.multiple) * fmt.multiple
        groups = rows * filled // GROUP * (fmt.group_numbers * width)
        size += rows * filled * fmt.bits // 8 + groups + rows * fmt.row_bytes
        largest = max(largest, rows * columns * width)
    size += sum(weight.numel() * width for weight in model.parameters() if id(weight) not in quantised)
    what = "linear layers and experts" if routed else "linear layers"
    said = f"{name} ({PACKAGE}): {what} at {fmt.bits} bits with their scales{copy_note(largest)}"
    return size + largest, said


def routed_experts(model: Any, text: Any, name: str | None, own: Any) -> RoutedExperts | None:
    """Return the experts of a model (built on the meta device) that may be in host memory; None: none may.

    Those in 4 bits. text: the decoder's config. name: of the format that weights are quantized to when they are loaded.
    own: the checkpoint's quantization_config.
    """
    options = {} if own is None else options_in(own)
    method, stored = options.get("quant_method"), None
    floats = _is_floats(method)
    if method == "gguf":
        if options["form"] != "tiles" or options["mixed"]:
            return None
        floats, group, stored = options["floats"], options["group"], options["experts"]
    elif floats:
        group = FLOAT_GROUP
    elif name == "int4":
        group = GROUP
    elif own is not None and importlib.util.find_spec(LIBRARY) is None and method in ("awq", "gptq"):
        group = int(options.get("group_size") or options.get("q_group_size") or 128)
    else:
        return None
    visited, _ = expert_counts(text)
    counts, block, packed = [], 0, 0
    for module in model.modules():
        if names := expert_parameters(module):
            shapes = [matrix_shape(module, own_name) for own_name in names]
            if not all(can_pack(shape.out, shape.columns, group) for shape in shapes):
                return None
            counts.append(shapes[0].experts)
            block = max(block, sum(BlockLayout(shape, group, floats).nbytes for shape in shapes))
            packed += sum(packed_bytes(shape, group) for shape in shapes)
    if not counts or len(set(counts)) > 1 or not visited or stored not in (None, 2 * len(counts)):
        return None
    return RoutedExperts(len(counts), counts[0], visited, block, packed)


def copy_note(copied: int) -> str:
    """Return the text about a copy of a matrix of `copied` bytes, to append to a description of weights."""
    return f", and a copy of one of {show_bytes(copied)}" if copied else ""


def quantized_bytes(model: Any, quantization: Any, width: int, stored: int | None) -> tuple[int, str]:
    """Return weight bytes of a quantised model, as stored or else by its bits, and a description."""
    options = options_in(quantization)
    given = options.get("quant_method") or "unnamed"
    method = str(getattr(given, "value", given)).rpartition(".")[2].lower()
    if _is_floats(method):
        return _float_bytes(model, width)
    if stored is not None:
        return stored, f"{method}, as stored in the folder"
    parameters = sum(weight.numel() for weight in model.parameters())
    if method == "gguf":
        size = (parameters - options["weights"]) * width + options["bytes"]
        copied = options["largest"] * width
        if options["form"] == "stored":
            return size, "GGUF: as it stores them, in 4 or 8 bits with scales"
        return size + copied, f"GGUF: what it stores in 4 bits, others in 16{copy_note(copied)}"
    bits = _bits_of(method, options)
    whole = {id(model.get_input_embeddings().weight), id(getattr(model.get_output_embeddings(), "weight", None))}
    # By shape and not by module class: experts are three-axis parameters, not nn.Linear.
    linear = sum(weight.numel() for weight in model.parameters() if weight.ndim >= 2 and id(weight) not in whole)
    size = round(linear * (bits + _SCALE_BITS) / 8) + (parameters - linear) * width
    return size, f"{method}: linear layers at {bits} bits and {_SCALE_BITS} for scales (an estimate)"


def _is_floats(method: str | None) -> bool:
    """Return True if experts of a checkpoint, or of a loaded model, are in MXFP4 and stay so."""
    return reads_floats(method) or method == FLOATS


def _float_bytes(model: Any, width: int) -> tuple[int, str]:
    """Return weight bytes of a model whose experts are in MXFP4 and stay so, and a description."""
    size, copied, packed = 0, 0, set()
    for module in model.modules():
        for name in expert_parameters(module) or ():
            packed.add(id(getattr(module, name)))
            size += packed_bytes(matrix_shape(module, name), FLOAT_GROUP)
            copied = max(copied, copied_bytes(module, width))
    size += sum(weight.numel() * width for weight in model.parameters() if id(weight) not in packed)
    return size + copied, f"mxfp4: experts at 4 bits with their scales{copy_note(copied)}"


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


DELTA_BLOCK = 64
"""Tokens of a block of transformers' gated delta rule: three float32 matrices of DELTA_BLOCK columns for each head."""
_AXES = (1,), (3, 1)
"""Leading sizes of positions: one for each token, or three for text and images."""


def rotary_numbers(model: nn.Module, head_dim: int) -> int:
    """Return cosines and sines per token of all rotary tables that a forward of `model` holds.

    A module with tables per layer type (Gemma-3) counts all of them. A module that cannot run on the meta device counts
    as two tables of head_dim.
    """
    return sum(_numbers_of(rotary, head_dim) for rotary in decoder_parts(model).rotaries)


def _numbers_of(rotary: nn.Module, head_dim: int) -> int:
    # the class's own, without what looks at positions to rescale: nothing can be looked at on the meta device
    forward = inspect.unwrap(type(rotary).forward)
    buffers = dict(rotary.named_buffers())
    typed = "layer_type" in inspect.signature(forward).parameters
    suffix = "_inv_freq"
    kinds = [name.removesuffix(suffix) for name in buffers if name.endswith(suffix) and "original" not in name]
    asked: list[dict[str, Any]] = [{"layer_type": kind} for kind in kinds] if typed else [{}]
    device = next((buffer.device for buffer in buffers.values()), torch.device("meta"))
    for leading in _AXES:
        positions = torch.zeros(*leading, 1, dtype=torch.long, device=device)
        try:
            with torch.no_grad():
                tables = [forward(rotary, torch.empty(1, 1, 1, device=device), positions, **one) for one in asked]
        except Exception:  # positions of another form, or a module of another kind
            continue
        return sum(table.numel() for pair in tables for table in pair if isinstance(table, Tensor))
    return 2 * head_dim


def state_chunk_bytes(model: nn.Module, text: Any, width: int) -> int:
    """Return bytes per token of a chunk at the peak of a layer that keeps a state; 0: unknown.

    text: the decoder's config; width: bytes of a number in the model's dtype. Of the gated delta rule as transformers
    computes it without flash-linear-attention, which takes less. At its end, when the output of blocks is put in a row,
    there are: the layer's input and its normalised copy, what the convolution made of queries, keys and values, gates,
    queries and keys repeated for each value head. In float32: five of the values' size (values, these by beta, new
    values, the output by blocks and in a row), five of the repeated keys' (keys by beta, these with decay and solved
    for, keys with decay, queries with decay), three matrices of a block, four numbers of each head (beta, decay twice,
    its sum).
    """
    if not getattr(text, "linear_conv_kernel_dim", None):
        return 0
    heads = text.linear_num_value_heads
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values, repeated = heads * text.linear_value_head_dim, heads * text.linear_key_head_dim
    own = 2 * text.hidden_size + (2 * keys + values) + values + 3 * heads
    if heads > text.linear_num_key_heads:
        own += 2 * repeated
    if any(hasattr(module, "in_proj_qkvz") for module in model.modules()):  # Qwen3-Next keeps what it was split from
        own += 2 * keys + 2 * values + 2 * heads
    return width * own + 4 * (5 * values + 5 * repeated + 3 * heads * DELTA_BLOCK + 4 * heads)
