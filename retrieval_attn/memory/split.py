"""What the busiest of several GPUs holds of a model: its part as a `ModelShape`, for the arithmetic of `plan`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from retrieval_attn.config import Place
from retrieval_attn.errors import ConfigError
from retrieval_attn.memory.shape import ModelShape

SPLITS = ("layers", "heads")


def part_of(shape: ModelShape, gpus: int, split: str) -> ModelShape:
    """The part of `shape` on the GPU that holds most, if `gpus` share it by `split`.

    layers (device_map): whole layers in turn; the first GPU has the embedding too, or the last the head.
    heads (tensor parallel): every GPU has all layers with its share of the heads, of the matrices and of the output's
    rows; embedding, hidden states and logits are whole on each. Raises ConfigError for a model that cannot be split so.
    """
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise ConfigError(f"gpus must be an integer >= 1, got {gpus!r}.")
    if split not in SPLITS:
        raise ConfigError(f"split must be one of {', '.join(SPLITS)}; got {split!r}.")
    if gpus == 1:
        return shape
    return _layers(shape, gpus) if split == "layers" else _heads(shape, gpus)


def embedding_place(place: Any, *, alone: bool) -> Place:
    """Where an input embedding is to lie. alone: the model is on one device; that of others stays with them.

    Raises ConfigError for what is no place, and for "host" where several devices share the model.
    """
    if place not in get_args(Place):
        raise ConfigError(f"embedding must be one of {', '.join(get_args(Place))}; got {place!r}.")
    if place == "host" and not alone:
        raise ConfigError("embedding='host' was given, but it is for a model on one GPU; leave it out.")
    found: Place = place
    return found if alone else "device"


def with_embedding(shape: ModelShape, place: Place, device_limit: int) -> ModelShape:
    """A model on one GPU whose input embedding lies at `place`.

    "auto": in host memory where weights take more than half of the GPU's, unless the output has the same table. A token
    reads one row of it. Raises ConfigError for "host" where the output has the same table.
    """
    if place == "host" and not shape.head_parameters:
        raise ConfigError(
            f"embedding='host' was given, but the output of {shape.name} multiplies by the same table, all of it for "
            "each token; leave it out."
        )
    fits = place == "auto" and 2 * shape.weight_bytes <= device_limit
    if place == "device" or fits or not shape.head_parameters:
        return shape
    table = shape.embedding_parameters * shape.dtype_bytes
    return replace(
        shape,
        weight_bytes=shape.weight_bytes - table,
        weights_note=f"{shape.weights_note}, embedding on the host",
        host_table_bytes=table,
    )


def _layers(shape: ModelShape, gpus: int) -> ModelShape:
    if gpus > shape.layers:
        raise ConfigError(f"{gpus} GPUs cannot share {shape.layers} layers; give gpus={shape.layers} or fewer.")
    held = -(-shape.layers // gpus)
    tables = shape.embedding_parameters + shape.head_parameters
    layer_bytes = (shape.weight_bytes - tables * shape.dtype_bytes) / shape.layers
    table_bytes = max(shape.embedding_parameters, shape.head_parameters) * shape.dtype_bytes
    # kinds of layers alternate, so each GPU has about its share of either
    full = min(shape.full_layers, -(-shape.full_layers // gpus))
    return replace(
        shape,
        weight_bytes=round(held * layer_bytes) + table_bytes,
        weights_note=f"{held} of {shape.layers} layers, one embedding table ({shape.weights_note})",
        layers=held,
        full_layers=full,
        sliding_layers=min(shape.sliding_layers, -(-shape.sliding_layers // gpus)),
        state_layers=min(shape.state_layers, -(-shape.state_layers // gpus)),
    )


def _heads(shape: ModelShape, gpus: int) -> ModelShape:
    if not shape.ranks_split_heads:
        raise ConfigError(
            f"{shape.name}: transformers' tensor parallel plan for {shape.model_type} gives every GPU all heads, so "
            f"each process would hold all keys; use gpus={gpus}, which share its layers (device_map)."
        )
    if shape.kv_heads % gpus or shape.q_heads % gpus:
        raise ConfigError(
            f"{shape.name} has {shape.q_heads} query and {shape.kv_heads} key-value heads, which {gpus} GPUs cannot "
            "share evenly; give a number of GPUs that divides both."
        )
    whole = shape.embedding_parameters * shape.dtype_bytes
    return replace(
        shape,
        weight_bytes=whole + -(-(shape.weight_bytes - whole) // gpus),
        weights_note=f"the embedding and 1/{gpus} of the rest ({shape.weights_note})",
        q_heads=shape.q_heads // gpus,
        kv_heads=shape.kv_heads // gpus,
        mlp_width=-(-shape.mlp_width // gpus),
    )
