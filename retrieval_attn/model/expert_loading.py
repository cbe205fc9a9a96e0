"""Loading models with experts in 4 bits: quantized as they are read, or from checkpoints in MXFP4.

transformers' loader calls a quantizer for each parameter, here one of ours: torchao's for linear layers with experts in
addition, and one for MXFP4, which transformers widens to bfloat16 unless the package `kernels` is installed.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from retrieval_attn.model.experts import expert_parameters, float_experts, quantized_experts
from retrieval_attn.model.layers import expert_counts

log = logging.getLogger(__name__)
METHOD = "retrieval_attn_experts"
"""Of the quantizer of whole experts, in transformers' registry."""
FLOATS = "retrieval_attn_mxfp4"
"""Of the quantizer that reads MXFP4."""
LIBRARY = "kernels"
FLOAT_GROUP = 32
"""Weights that share a scale in MXFP4."""
_CAPABILITY = 8
"""Of a GPU whose kernels multiply 4 bits."""


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


def float_options(config: Any, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the options of from_pretrained that load such a checkpoint for a device: its config, changed in place.

    options: of the config's own quantization_config.
    """
    _register_floats()
    text = config.get_text_config(decoder=True)
    holder = config if getattr(config, "quantization_config", None) is not None else text
    holder.quantization_config = {**options, "quant_method": FLOATS, "device": str(device)}
    return {"config": config}


@functools.cache
def _register_floats() -> None:
    """Tell transformers' loader of the quantizer for MXFP4, once."""
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import get_module_from_name
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class FloatsConfig(QuantizationConfigMixin):
        def __init__(self, **options: Any) -> None:
            self.__dict__.update(options)
            self.quant_method = FLOATS  # type: ignore[assignment]

    class FloatsConvert(ConversionOps):
        def __init__(self, device: torch.device) -> None:
            self._device = device

        def convert(
            self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **given: Any
        ) -> dict[str, Any]:
            name = given["full_layer_name"]
            module, leaf = get_module_from_name(given["model"], name)
            tensors = {key: one[0] if isinstance(one, list) else one for key, one in input_dict.items()}
            blocks, scales = (
                next(one for key, one in tensors.items() if key.endswith(part)) for part in ("blocks", "scales")
            )
            packed, dtype = _is_packed(module, leaf), getattr(module, leaf).dtype
            device = self._device if packed else torch.device("cpu")
            held = float_experts(blocks, scales, dtype=dtype, transposed=module.is_transposed, device=device)
            if packed:
                return {name: nn.Parameter(held, requires_grad=False)}
            log.warning("%s: experts of these sizes are unpacked to %s", name, dtype)
            return {name: nn.Parameter(held.copies(0, len(held)).contiguous(), requires_grad=False)}

    class FloatsQuantizer(HfQuantizer):
        def get_weight_conversions(self) -> list[Any]:
            convert = FloatsConvert(torch.device(self.quantization_config.device))  # type: ignore[attr-defined]
            return [
                WeightConverter([f"{leaf}_blocks", f"{leaf}_scales"], rf"{leaf}$", [convert], force_cpu=True)
                for leaf in ("gate_up_proj", "down_proj")
            ]

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False

    register_quantization_config(FLOATS)(FloatsConfig)
    register_quantizer(FLOATS)(FloatsQuantizer)


@functools.cache
def quantized_experts_config() -> type:
    """Return torchao's config for transformers with experts in 4 bits, and tell transformers' loader of it, once."""
    from transformers import TorchAoConfig
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer
    from transformers.quantizers.quantizers_utils import get_module_from_name

    class ExpertsConfig(TorchAoConfig):
        """device: of the weights, a text."""

        def __init__(self, *args: Any, device: str, **options: Any) -> None:
            super().__init__(*args, **options)
            own: Any = self
            own.quant_method, own.device = METHOD, device

    class ExpertsQuantize(ConversionOps):
        def __init__(self, own: Any, device: torch.device) -> None:
            self._own, self._device = own, device

        def convert(
            self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **given: Any
        ) -> dict[str, Any]:
            name = given["full_layer_name"]
            module, leaf = get_module_from_name(given["model"], name)
            if not _is_packed(module, leaf):
                found: dict[str, Any] = self._own.convert(input_dict, source_patterns=source_patterns, **given)
                return found
            (value,) = input_dict.values()
            value = value[0] if isinstance(value, list) else value
            weight = quantized_experts(value, transposed=module.is_transposed, device=self._device)
            return {name: nn.Parameter(weight, requires_grad=False)}

    class ExpertsQuantizer(TorchAoHfQuantizer):
        def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
            module, leaf = get_module_from_name(model, param_name)
            return _is_packed(module, leaf) or super().param_needs_quantization(model, param_name, **options)

        def get_quantize_ops(self) -> Any:
            return ExpertsQuantize(
                super().get_quantize_ops(), torch.device(str(vars(self.quantization_config)["device"]))
            )

        def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
            """Join the matrices of a layer's experts in host memory: a GPU has those of one expert at a time."""
            for one in weight_conversions:
                if isinstance(one, WeightConverter) and any(".experts" in target for target in one.target_patterns):
                    one.force_cpu = True
            return super().update_weight_conversions(weight_conversions)

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return False

    register_quantization_config(METHOD)(ExpertsConfig)
    register_quantizer(METHOD)(ExpertsQuantizer)
    return ExpertsConfig


def _is_packed(module: nn.Module, leaf: str) -> bool:
    return leaf in (expert_parameters(module) or ())
