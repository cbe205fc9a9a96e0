"""Whether host memory holds the contexts of a benchmark of a whole model, before anything is made."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from retrieval_attn.errors import ConfigError, MemoryPlanError

__all__ = ["model_config", "require_host_room"]


def model_config(model: str, shape: str | None, layers: int | None = None, yarn: float | None = None) -> Any:
    """Configuration of a named model, or of random weights of a shape with so many layers (None: all of them). Loads no
    weights. Raises InputDataError or ConfigError, for layers without a shape, too.
    """
    if shape is None and layers is not None:
        raise ConfigError(f"--layers {layers} needs random weights: give --shape, or drop it")
    if shape is not None:
        from retrieval_attn_eval.bench.random_model import random_config

        return random_config(shape, layers=layers)
    from retrieval_attn_eval.models import load_description, model_path

    return load_description(model_path(model), yarn)[0]


def require_host_room(
    args: argparse.Namespace, lengths: Sequence[int], indexes: Sequence[tuple[str, Mapping[str, Any]]], read: bool
) -> None:
    """Refuse contexts whose keys do not fit this machine, by arithmetic.

    args: the flags of a benchmark of a whole model. indexes: kinds with their options, one method at a time. read: the
    model reads the text itself; else the keys are synthetic, of `args.distinct_layers` layers. Without a GPU the
    weights are counted too. Raises MemoryPlanError with what is needed, what is there and what to do.
    """
    from retrieval_attn import Config, plan
    from retrieval_attn.memory.units import host_memory_bytes, show_bytes
    from retrieval_attn.model.loading import choose_device

    config = model_config(args.model, args.shape)
    on_cpu = choose_device(args.device).type == "cpu"
    auto = "float32" if on_cpu else None
    dtype = auto if args.dtype == "auto" else args.dtype
    layers = config.get_text_config(decoder=True).num_hidden_layers
    distinct = layers if read else min(args.distinct_layers or layers, layers)
    tokens, there = max(lengths), host_memory_bytes()
    most = fixed = plain = 0
    for kind, options in indexes or [("flat", {})]:
        chosen = Config(index=kind, index_options=options, host_dtype=args.host_dtype)
        planned = plan(config, tokens, 1 << 60, 1 << 60, args.batch, chosen, decide=False, dtype=dtype)
        process = next(item.bytes for item in planned.host if item.name == "process and staging")
        fixed = process + (planned.shape.weight_bytes if on_cpu else 0)
        plain = args.batch * tokens * planned.kv_bytes_per_token
        most = max(most, planned.host_bytes - process if indexes else 0)
    # what is read is kept once more, with its values; synthetic keys without
    own = most + (plain if read else plain // 2)
    total = fixed + own * distinct // layers
    if total > there:
        fewer = max(0, there - fixed) * layers // own
        less = "shorter --lengths" if read or not fewer else f"shorter --lengths or --distinct-layers {fewer}"
        raise MemoryPlanError(
            f"--lengths {tokens}: a context with all of {distinct} distinct layers needs {show_bytes(total)} of host "
            f"memory ({show_bytes(fixed)} for the process; keys are held once to be handed out and once by the method "
            f"that holds most), this machine has {show_bytes(there)}; give {less}"
        )
