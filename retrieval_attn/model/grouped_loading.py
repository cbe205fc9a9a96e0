"""Loading GPTQ's and AWQ's checkpoints without their package: matrices of 4 bits in torchao's form, or whole on a CPU.

transformers reads such checkpoints by gptqmodel, whose modules no kernel here matches. Where that is not installed, its
loader is told of a quantiser of ours, which turns the tensors of a matrix into its weight as they are read.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.gpu.packed import GROUPS
from retrieval_attn.model.grouped import of_awq, of_gptq
from retrieval_attn.model.quantization import options_in, own_method, require_package

METHOD = "retrieval_attn_grouped"
"""Of the quantiser, as transformers' registry knows it."""
LIBRARY = "gptqmodel"
PARTS = "qweight", "qzeros", "scales", "g_idx"


def reads_grouped(config: Any) -> bool:
    """Whether a checkpoint with this config is one of these, and their package is not there."""
    return own_method(config) in ("gptq", "awq") and importlib.util.find_spec(LIBRARY) is None


def kernel_format(config: Any, quantization: str | None) -> str | None:
    """Name of the format that weights will have once they are loaded, None: as the checkpoint has them. quantization:
    that was asked for.
    """
    return "int4" if quantization is None and reads_grouped(config) else quantization


def grouped_options(config: Any, device: torch.device) -> dict[str, Any]:
    """Return the options of from_pretrained that load such a checkpoint for a device: its config, changed in place.

    Raises ConfigError for what only the package reads.
    """
    text = config.get_text_config(decoder=True)
    holder = config if getattr(config, "quantization_config", None) is not None else text
    options = options_in(holder.quantization_config)
    method = own_method(config)
    layout = str(options.get("checkpoint_format") or options.get("version") or options.get("format") or "").lower()
    known = {"gptq": ("", "gptq", "gptq_v2"), "awq": ("", "gemm")}[str(method)]
    if options.get("bits", options.get("w_bit", 4)) != 4 or layout not in known:
        raise ConfigError(
            f"This checkpoint is quantised by {method} in {options.get('bits')} bits and the layout {layout!r}; only 4 "
            f"bits in {' or '.join(repr(one) for one in known if one)} are read without its package: `pip install "
            f"{LIBRARY}`."
        )
    if options.get("desc_act"):
        raise ConfigError(
            f"This checkpoint has columns in the order of their activations (desc_act): `pip install {LIBRARY}`, or "
            "take one without."
        )
    group = int(options.get("group_size") or options.get("q_group_size") or 128)
    if device.type == "cuda":
        require_package(f"Weights of {method} on a GPU", "torchao")
        if group not in GROUPS:
            raise ConfigError(
                f"This checkpoint has groups of {group} weights, torch's kernel takes {GROUPS}: "
                f"`pip install {LIBRARY}`."
            )
    _register()
    holder.quantization_config = {
        **options, "quant_method": METHOD, "of": method, "layout": layout, "whole": device.type != "cuda",
    }  # fmt: skip
    return {"config": config, "output_loading_info": True}


def whole_model(model: Any, told: Mapping[str, Any]) -> Any:
    """The model, of what from_pretrained gives with these options. Raises ConfigError where weights had no tensors:
    those of experts, which lie together in a model and apart in a checkpoint, and have random numbers then.
    """
    missing = sorted(told["missing_keys"])
    if missing:
        raise ConfigError(
            f"{len(missing)} weights of this checkpoint are not read without its package, such as {missing[0]!r}: `pip "
            f"install {LIBRARY}`."
        )
    return model


def converted(method: str, layout: str, parts: Mapping[str, Tensor], *, whole: bool, dtype: torch.dtype) -> Tensor:
    """The weight of a matrix from its tensors by name of PARTS. whole: in `dtype`, not in torchao's form. Raises
    InputDataError.
    """
    if lacking := [name for name in PARTS[:3] if name not in parts]:
        raise InputDataError(f"a matrix in 4 bits has no {', '.join(lacking)}; the checkpoint is damaged")
    qweight, qzeros, scales = (parts[name] for name in PARTS[:3])
    if method == "awq":
        matrix = of_awq(qweight, qzeros, scales)
    else:
        matrix = of_gptq(qweight, qzeros, scales, parts.get("g_idx"), moved=layout != "gptq_v2")
    found: Tensor = matrix.weights().to(dtype) if whole else matrix.packed()
    return found


@functools.cache
def _register() -> None:
    """Tell transformers' loader of the quantiser, once."""
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class GroupedConfig(QuantizationConfigMixin):
        def __init__(self, **options: Any) -> None:
            self.__dict__.update(options)
            self.quant_method = METHOD  # type: ignore[assignment]

    class Convert(ConversionOps):
        def __init__(self, config: Any) -> None:
            self._config = config

        def convert(
            self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **given: Any
        ) -> dict[str, Any]:
            name = given["full_layer_name"]
            module: Any = given["model"].get_submodule(name.rpartition(".")[0])  # its weight has no storage yet
            parts = {
                part: tensors[0] if isinstance(tensors, list) else tensors
                for key, tensors in input_dict.items()
                for part in PARTS
                if part in key
            }
            options = {"whole": self._config.whole, "dtype": module.weight.dtype}
            weight = converted(self._config.of, self._config.layout, parts, **options)
            return {name: nn.Parameter(weight, requires_grad=False)}

    class Quantizer(HfQuantizer):
        def get_weight_conversions(self) -> list[Any]:
            sources = [rf"\.{part}$" for part in PARTS]
            return [WeightConverter(sources, r"\.weight$", [Convert(self.quantization_config)])]

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return False

    register_quantization_config(METHOD)(GroupedConfig)
    register_quantizer(METHOD)(Quantizer)
