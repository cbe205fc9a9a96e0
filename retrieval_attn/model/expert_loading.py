"""Loading models with experts in 4 bits: quantized as they are read, or from checkpoints in MXFP4.

transformers' loader calls a quantizer for each parameter, here one of ours: torchao's for linear layers with experts in
addition, and one for MXFP4, which transformers widens to bfloat16 unless the package `kernels` is installed.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TorchAoConfig
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from retrieval_attn.errors import InputDataError
from retrieval_attn.model.experts import expert_parameters, float_experts, quantized_experts
from retrieval_attn.model.layers import expert_counts

log = logging.getLogger(__name__)
METHOD = "retrieval_attn_experts"
"""Of the quantizer of whole experts, in transformers' registry."""
FLOATS = "retrieval_attn_mxfp4"
"""Of the quantizer that reads MXFP4."""
READ = "retrieval_attn_read"
"""Of the quantizer of weights that arrive as they will be held."""
LIBRARY = "kernels"
FLOAT_GROUP = 32
"""Weights that share a scale in MXFP4."""
_CAPABILITY = 8
"""Of a GPU whose kernels multiply 4 bits."""


def replace_quantization(config: Any, method: str, options: dict[str, Any]) -> None:
    """Replace the quantization_config of a config or of its text decoder. method: of a registered quantizer."""
    text = config.get_text_config(decoder=True)
    holder = config if getattr(config, "quantization_config", None) is not None else text
    holder.quantization_config = {**options, "quant_method": method}


class ReadConfig(QuantizationConfigMixin):
    """Options of a quantizer, as attributes."""

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)


@register_quantizer(READ)
class ReadQuantizer(HfQuantizer):
    """A quantizer whose models are neither saved nor trained; by itself it converts nothing."""

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Return False."""
        return False

    def param_element_size(self, *_: Any) -> float:
        """Return 0 bytes: transformers allocates all weights' bytes at once before it loads them, in the dtype of the
        model, which for weights of 4 bits may exceed the GPU.
        """
        return 0

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        self._shapes = {name: one.shape for name, one in model.named_parameters()}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        """Raise InputDataError for weights of other shapes, which transformers looks at without a quantizer alone."""
        for name, one in model.named_parameters():
            if one.shape != self._shapes.get(name, one.shape):
                raise InputDataError(
                    f"{name} has shape {tuple(one.shape)} in this checkpoint, the config asks for "
                    f"{tuple(self._shapes[name])}: the files are of different models; download them again."
                )

    @property
    def is_trainable(self) -> bool:
        """False."""
        return False


class MakeParameter(ConversionOps):
    """Make a parameter of a module from tensors of a checkpoint.

    make: takes the module, the parameter's full name, and lists of tensors by source pattern, in the patterns' order.
    """

    def __init__(self, make: Callable[[Any, str, dict[str, list[Tensor]]], Tensor]) -> None:
        self._make = make

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **given: Any
    ) -> dict[str, Any]:
        """Return the parameter by its full name."""
        name = given["full_layer_name"]
        module, _ = get_module_from_name(given["model"], name)
        found = {pattern: input_dict[pattern] for pattern in source_patterns if pattern in input_dict}
        tensors = {pattern: list(one) if isinstance(one, list) else [one] for pattern, one in found.items()}
        return {name: nn.Parameter(self._make(module, name, tensors), requires_grad=False)}


def has_experts(config: Any) -> bool:
    """Return True if models of this config have experts."""
    return bool(expert_counts(config.get_text_config(decoder=True))[1])


def reads_floats(method: str | None) -> bool:
    """Return True if checkpoints of this method are in MXFP4, and the package that multiplies it is not installed."""
    return method == "mxfp4" and importlib.util.find_spec(LIBRARY) is None


def can_hold_floats(device: torch.device) -> bool:
    """Return True if MXFP4 stays in 4 bits on a device."""
    return device.type == "cpu" or (
        device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _CAPABILITY
    )


def float_options(
    config: Any, options: Mapping[str, Any], device: torch.device, host_experts: int = 0
) -> dict[str, Any]:
    """Return the options of from_pretrained that load such a checkpoint for a device: its config, changed in place.

    options: of the config's own quantization_config. host_experts: of each layer, in host memory.
    """
    replace_quantization(config, FLOATS, {**options, "device": str(device), "host_experts": host_experts})
    return {"config": config}


def _float_parameter(
    device: torch.device, host_experts: int, module: Any, name: str, tensors: dict[str, list[Tensor]]
) -> Tensor:
    """Return a parameter of experts from their blocks and scales in MXFP4."""
    (blocks,), (scales,) = tensors.values()
    leaf = name.rpartition(".")[2]
    packed, dtype = _is_packed(module, leaf), getattr(module, leaf).dtype
    place = device if packed else torch.device("cpu")
    held = float_experts(
        blocks, scales, dtype=dtype, transposed=module.is_transposed, device=place, on_host=host_experts
    )
    if packed:
        return held
    log.warning("%s: experts of these sizes are unpacked to %s", name, dtype)
    return held.copies(0, len(held)).contiguous()


@register_quantizer(FLOATS)
class FloatsQuantizer(ReadQuantizer):
    """Read experts in MXFP4."""

    def get_weight_conversions(self) -> list[Any]:
        """Return a conversion for each matrix of an expert."""
        own = vars(self.quantization_config)
        make = MakeParameter(partial(_float_parameter, torch.device(own["device"]), own["host_experts"]))
        return [
            WeightConverter([f"{leaf}_blocks", f"{leaf}_scales"], rf"{leaf}$", [make], force_cpu=True)
            for leaf in ("gate_up_proj", "down_proj")
        ]


@register_quantization_config(METHOD)
class ExpertsConfig(TorchAoConfig):
    """torchao's config with experts in 4 bits. device: of the weights, a text. host_experts: see `float_options`."""

    def __init__(self, *args: Any, device: str, host_experts: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        own: Any = self
        own.quant_method, own.device, own.host_experts = METHOD, device, host_experts


class ExpertsQuantize(ConversionOps):
    """Quantize experts; other weights by `own`, torchao's operation."""

    def __init__(self, own: Any, device: torch.device, host_experts: int) -> None:
        self._own, self._make = own, MakeParameter(partial(_quantized_parameter, device, host_experts))

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **given: Any
    ) -> dict[str, Any]:
        """Return the parameter by its full name."""
        if _is_packed(*get_module_from_name(given["model"], given["full_layer_name"])):
            return self._make.convert(input_dict, list(input_dict), target_patterns, **given)
        found: dict[str, Any] = self._own.convert(input_dict, source_patterns=source_patterns, **given)
        return found


def _quantized_parameter(
    device: torch.device, host_experts: int, module: Any, _: str, tensors: dict[str, list[Tensor]]
) -> Tensor:
    ((value, *_rest),) = tensors.values()
    return quantized_experts(value, transposed=module.is_transposed, device=device, on_host=host_experts)


@register_quantizer(METHOD)
class ExpertsQuantizer(TorchAoHfQuantizer):
    """Quantize experts as they are read, and linear layers by torchao."""

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        """Return True for packed experts and torchao's parameters."""
        packed = _is_packed(*get_module_from_name(model, param_name))
        return packed or super().param_needs_quantization(model, param_name, **options)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Return the bytes of a number that are allocated ahead; 0 for experts that may be in host memory."""
        placed = vars(self.quantization_config)["host_experts"] and _is_packed(*get_module_from_name(model, param_name))
        return 0 if placed else super().param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> Any:
        """Return the operation that quantizes a parameter."""
        own = vars(self.quantization_config)
        return ExpertsQuantize(super().get_quantize_ops(), torch.device(str(own["device"])), own["host_experts"])

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        """Join the matrices of a layer's experts in host memory: a GPU has those of one expert at a time."""
        for one in weight_conversions:
            if isinstance(one, WeightConverter) and any(".experts" in target for target in one.target_patterns):
                one.force_cpu = True
        return super().update_weight_conversions(weight_conversions)

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Return False."""
        return False


register_quantization_config(FLOATS)(ReadConfig)
register_quantization_config(READ)(ReadConfig)


def _is_packed(module: nn.Module, leaf: str) -> bool:
    return leaf in (expert_parameters(module) or ())
