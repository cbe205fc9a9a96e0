"""Weights in 8 and 4 bits, by the libraries that transformers offers: chosen when a model is loaded, or its own.

A checkpoint that is quantised already (torchao, bitsandbytes, compressed-tensors, AWQ, GPTQ, ...) is loaded as
transformers loads it; those of AWQ and GPTQ without their package by `grouped_loading.py`. Nothing here computes with
weights.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrieval_attn.errors import ConfigError
from retrieval_attn.gpu.packed import PackedWeights
from retrieval_attn.model.expert_loading import ExpertsConfig, has_experts
from retrieval_attn.model.experts import copied_bytes, has_packed_experts
from retrieval_attn.model.layers import modules_of
from retrieval_attn.model.placement import is_host_table

GROUP = 64
"""Weights that share a scale in 4 bits."""


class WeightFormat(NamedTuple):
    """How one of the names below stores the matrices of linear layers.

    bits: of a weight. group_numbers: scales and zero points of GROUP weights, numbers in the model's dtype. row_bytes:
    of the scales of a row of a matrix. multiple: to which a row is filled up on a GPU.
    """

    bits: int
    group_numbers: int = 0
    row_bytes: int = 0
    multiple: int = 1


PACKAGE = "torchao"
"""The library that quantizes weights when they are loaded."""
# int8: a symmetric scale per row. int4: a scale and a zero point per group, kernels of torch.
FORMATS = {"int8": WeightFormat(8, row_bytes=4), "int4": WeightFormat(4, group_numbers=2, multiple=1024)}

# What a checkpoint's quant_method needs in addition to transformers, as pip names it.
PACKAGES = {
    "aqlm": "aqlm",
    "auto-round": "auto-round",
    "awq": "gptqmodel",
    "bitnet": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "eetq",
    "fbgemm_fp8": "fbgemm-gpu",
    "fp8": "accelerate",
    "gptq": "gptqmodel",
    "higgs": "flute-kernel",
    "hqq": "hqq",
    "mxfp4": "kernels",
    "quanto": "optimum-quanto",
    "quark": "amd-quark",
    "spqr": "spqr_quant",
    "torchao": "torchao",
    "vptq": "vptq",
}


def weight_format(name: str) -> WeightFormat:
    """The format of a name; raises ConfigError for others."""
    if name not in FORMATS:
        raise ConfigError(f"quantization must be one of {', '.join(FORMATS)}, or None; got {name!r}.")
    return FORMATS[name]


def own_method(config: Any) -> str | None:
    """The method by which a checkpoint with this config is quantised already; None for whole weights."""
    options = quantization_of(config)
    if options is None:
        return None
    method = options_in(options).get("quant_method") or "unnamed"
    return str(getattr(method, "value", method))


def quantization_of(config: Any) -> Any:
    """Return the quantization_config of a config or of its text decoder; None: it has none."""
    text = config.get_text_config(decoder=True)
    return getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)


def options_in(quantization: Any) -> dict[str, Any]:
    """The options of a config's quantization_config, which is a dict or an object of transformers."""
    found: dict[str, Any] = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return found


def chosen_dtype(name: str | None, dtype: str, device: torch.device) -> str:
    """The dtype that goes with a quantisation: as given, but int4's kernels on a GPU take bfloat16 only.

    Raises ConfigError for another one.
    """
    if name != "int4" or device.type != "cuda" or dtype == "bfloat16":
        return dtype
    if dtype != "auto":
        raise ConfigError(f'quantization="int4" needs dtype="bfloat16" on a GPU, got {dtype!r}; leave dtype out.')
    return "bfloat16"


def loading_config(name: str, config: Any, device: torch.device, host_experts: int = 0) -> Any:
    """transformers' quantization_config for a name of FORMATS, for weights that will lie on `device`.

    config: the checkpoint's. host_experts: of each layer, in host memory. Raises ConfigError: an unknown name, a
    checkpoint that is quantised already, a package that is not installed, a GPU that has no kernels for it.
    """
    weight_format(name)
    method = own_method(config)
    if method is not None:
        raise ConfigError(
            f"quantization={name!r} was given, but this checkpoint is quantised already ({method}); leave it out."
        )
    require_package(f"quantization={name!r}", PACKAGE)
    from transformers import TorchAoConfig

    try:
        if name == "int4" and has_experts(config):
            return ExpertsConfig(int4_config(device), device=str(device), host_experts=host_experts)
        return TorchAoConfig(_int8() if name == "int8" else int4_config(device))
    except ImportError as error:
        raise ConfigError(
            f"quantization={name!r} needs a newer torchao than the one that is installed ({error}); "
            "`pip install --upgrade torchao`."
        ) from error


def _int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(set_inductor_config=False)


def int4_config(device: torch.device) -> Any:
    """torchao's 4-bit weights in the layout of a kernel that torch itself brings: another one on the CPU."""
    if device.type != "cuda":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    from torchao.quantization import Int4WeightOnlyConfig

    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ConfigError(
            f'quantization="int4" needs a GPU of compute capability 8.0 or more, this one has {major}.{minor}; use '
            '"int8".'
        )
    layout: Any = "tile_packed_to_4d"
    return Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format=layout, set_inductor_config=False)


def require_package(what: str, package: str) -> None:
    """Raise ConfigError, naming the package to install, where `package` is not there."""
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise ConfigError(f"{what} needs the package {package}, which is not installed; `pip install {package}`.")


def missing_package(error: ImportError, config: Any) -> ConfigError:
    """Return the error for a checkpoint that failed to load because a package is missing."""
    method = own_method(config)
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if method is None:
        return ConfigError(f"Loading this model needs a package that is not installed ({reason}); install it.")
    package = PACKAGES.get(method.lower(), method)
    return ConfigError(
        f"The weights of this checkpoint are quantised by {method}, which needs the package {package} ({reason}); "
        f"`pip install {package}`."
    )


def plain_tensors(weights: Iterable[Tensor]) -> Iterable[Tensor]:
    """The tensors that hold the numbers: parts of those that only stand for others, as torchao's do."""
    for weight in weights:
        if hasattr(weight, "__tensor_flatten__"):
            parts = (getattr(weight, name) for name in weight.__tensor_flatten__()[0])
            yield from plain_tensors(part for part in parts if isinstance(part, Tensor))
        else:
            yield weight
        scales = getattr(weight, "quant_state", None)  # bitsandbytes' 4-bit weights
        absmax = getattr(scales, "absmax", None)
        if isinstance(absmax, Tensor):
            yield absmax


def held_bytes(model: nn.Module) -> int:
    """Return bytes of a model's parameters and buffers, without a table in host memory."""
    weights = plain_tensors((*model.parameters(), *model.buffers()))
    return sum(item.numel() * item.element_size() for item in weights if not is_host_table(item))


def packed_weights(module: nn.Module) -> PackedWeights | None:
    """Return the packed 4-bit weights of a linear module; None for other modules and other layouts.

    None too for weights with a scale of the inputs (AWQ in torchao).
    """
    kind = _kind()
    weight: Any = getattr(module, "weight", None)
    if kind is None or type(module) is not nn.Linear or type(weight) is not kind or weight.act_pre_scale is not None:
        return None
    bias = None if module.bias is None else module.bias.detach()
    weights = PackedWeights(weight.qdata, weight.scale_and_zero, weight.shape[1], bias)
    whole = weight.ndim == 2 and weight.shape == weights.shape and weights.is_whole
    return weights if whole and weights.group == weight.block_size[-1] else None


def packed_modules(root: nn.Module) -> list[tuple[Any, PackedWeights]]:
    """Return linear modules in `root` with packed weights, and the weights; no walk if no module can have any."""
    if not may_be_packed():
        return []
    found = ((module, packed_weights(module)) for module in modules_of(root))
    return [(module, weights) for module, weights in found if weights is not None]


def may_be_packed() -> bool:
    """Return True if any module of the process can have packed weights."""
    return _kind() is not None


def _kind() -> Any:
    library: Any = sys.modules.get("torchao.quantization")  # imported already if there are such weights
    return getattr(library, "Int4TilePackedTo4dTensor", None)


def unpacked_bytes(model: nn.Module) -> int:
    """Return bytes of the largest bfloat16 copy of a packed matrix, or of some experts' ones; 0 if there is none."""
    sizes = (weights.shape for _, weights in packed_modules(model))
    linear = max((2 * rows * columns for rows, columns in sizes), default=0)
    packed = (module for module in modules_of(model) if has_packed_experts(module))
    return max(linear, *(copied_bytes(module, 2) for module in packed), 0)
