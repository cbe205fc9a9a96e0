"""Parts of the quantizers by which transformers' loader reads weights of 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin


def replace_quantization(config: Any, method: str, options: dict[str, Any]) -> None:
    """Replace the quantization_config of a config or of its text decoder. method: of a registered quantizer."""
    text = config.get_text_config(decoder=True)
    holder = config if getattr(config, "quantization_config", None) is not None else text
    holder.quantization_config = {**options, "quant_method": method}


class ReadConfig(QuantizationConfigMixin):
    """Options of a quantizer, as attributes."""

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)


class ReadQuantizer(HfQuantizer):
    """A quantizer whose models are neither saved nor trained."""

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Return False."""
        return False

    def param_element_size(self, *_: Any) -> float:
        """Return 0 bytes: transformers allocates all weights' bytes at once before it loads them, in the dtype of the
        model, which for weights of 4 bits may exceed the GPU.
        """
        return 0

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
