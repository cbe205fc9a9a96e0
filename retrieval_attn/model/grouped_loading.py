"""Loading GPTQ's and AWQ's checkpoints without their package: matrices of 4 bits in torchao's form, or whole on a CPU.

transformers reads such checkpoints by gptqmodel, whose modules no kernel here matches. Where that is not installed, its
loader is told of a quantiser of ours, which turns the tensors of a matrix into its weight as they are read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.gpu.packed import GROUPS
from retrieval_attn.model.expert_loading import MakeParameter, ReadConfig, ReadQuantizer, replace_quantization
from retrieval_attn.model.experts import expert_parameters, grouped_experts, matrix_shape
from retrieval_attn.model.grouped import GroupedMatrix, of_awq, of_gptq
from retrieval_attn.model.quantization import options_in, own_method, quantization_of, require_package

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


def grouped_options(config: Any, device: torch.device, host_experts: int = 0) -> dict[str, Any]:
    """Return the options of from_pretrained that load such a checkpoint for a device: its config, changed in place.

    host_experts: of each layer, in host memory. Raises ConfigError for what only the package reads.
    """
    options = options_in(quantization_of(config))
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
    own = {"of": method, "layout": layout, "whole": device.type != "cuda", "device": str(device)}
    replace_quantization(config, METHOD, {**options, **own, "host_experts": host_experts})
    return {"config": config, "output_loading_info": True}


def whole_model(model: Any, told: Mapping[str, Any]) -> Any:
    """The model, of what from_pretrained gives with these options. Raises ConfigError where weights had no tensors:
    those of experts that transformers joins in a way of their own, which have random numbers then.
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
    matrix = grouped_matrix(method, layout, parts)
    found: Tensor = matrix.weights().to(dtype) if whole else matrix.packed()
    return found


def grouped_matrix(method: str, layout: str, parts: Mapping[str, Tensor]) -> GroupedMatrix:
    """Return a matrix of its tensors by name of PARTS. Raises InputDataError."""
    if lacking := [name for name in PARTS[:3] if name not in parts]:
        raise InputDataError(f"a matrix in 4 bits has no {', '.join(lacking)}; the checkpoint is damaged")
    qweight, qzeros, scales = (parts[name] for name in PARTS[:3])
    if method == "awq":
        return of_awq(qweight, qzeros, scales)
    return of_gptq(qweight, qzeros, scales, parts.get("g_idx"), moved=layout != "gptq_v2")


def joined_experts(
    config: Any, experts: Mapping[str, list[Mapping[str, Tensor]]], module: nn.Module, name: str
) -> Tensor:
    """Return a parameter of a module of experts. experts: tensors of each expert by name of PARTS, by name of a matrix:
    of one, or of gate and up. config: of the quantizer. Raises InputDataError.
    """
    whole = getattr(module, name)
    device = torch.device(config.device)
    packed = name in (expert_parameters(module) or ()) and not module.is_transposed

    def matrices(place: torch.device) -> Iterator[GroupedMatrix]:
        for parts in zip(*experts.values(), strict=True):
            there = [{part: one.to(place) for part, one in own.items()} for own in parts]
            own = [grouped_matrix(config.of, config.layout, one) for one in there]
            yield GroupedMatrix(*(torch.cat(fields) for fields in zip(*own, strict=True)))

    if not packed:
        return torch.stack([one.weights().to(whole.dtype) for one in matrices(torch.device("cpu"))])
    first = next(matrices(torch.device("cpu")))
    shape = matrix_shape(module, name)
    if tuple(first.numbers.shape) != shape[1:] or len(next(iter(experts.values()))) != shape[0]:
        raise InputDataError(f"{name} has experts of {tuple(first.numbers.shape)} in this checkpoint, not {shape[1:]}")
    return grouped_experts(
        matrices(device), shape, first.group, dtype=whole.dtype, device=device, on_host=config.host_experts
    )


@register_quantizer(METHOD)
class GroupedQuantizer(ReadQuantizer):
    """Read matrices of GPTQ and AWQ, and those of experts."""

    def get_weight_conversions(self) -> list[Any]:
        """Return the conversion of a linear layer's matrix."""
        make = MakeParameter(partial(_matrix_parameter, self.quantization_config))
        return [WeightConverter([rf"\.{part}$" for part in PARTS], r"\.weight$", [make])]

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        """Read experts' matrices before the general patterns do, joined in host memory."""
        join = MakeParameter(partial(_experts_parameter, self.quantization_config))
        found = []
        for one in weight_conversions:
            kinds = {type(operation) for operation in getattr(one, "operations", ())}
            sources = [source.removesuffix(".weight") for source in one.source_patterns]
            if MergeModulelist in kinds and kinds <= {MergeModulelist, Concatenate}:
                patterns = [f"{source}.{part}" for source in sources for part in PARTS]
                found.append(WeightConverter(patterns, one.target_patterns, [join], force_cpu=True))
        return [*weight_conversions, *found, *self.get_weight_conversions()]


register_quantization_config(METHOD)(ReadConfig)


def _matrix_parameter(config: Any, module: Any, _: str, tensors: dict[str, list[Tensor]]) -> Tensor:
    """Return the weight of a linear layer. config: of the quantizer."""
    parts = {part: own[0] for pattern, own in tensors.items() for part in PARTS if part in pattern}
    return converted(config.of, config.layout, parts, whole=config.whole, dtype=module.weight.dtype)


def _experts_parameter(config: Any, module: Any, name: str, tensors: dict[str, list[Tensor]]) -> Tensor:
    """Return a parameter of experts, whose matrices transformers would join once they are whole."""
    experts: dict[str, list[Any]] = {}
    for pattern, given in tensors.items():
        matrix, _, part = pattern.rpartition(".")
        own = experts.setdefault(matrix, [{} for _ in given])
        for expert, tensor in zip(own, given, strict=False):
            expert[part] = tensor
    return joined_experts(config, experts, module, name.rpartition(".")[2])
