"""The sizes of a model that decide its memory, whole or divided among GPUs: read from its config, no weights loaded.

Parameters are counted exactly, by building the model on torch's meta device. Only the bytes of quantised
weights are estimates, unless the folder with the weights tells them.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from retrieval_attn.config import Place
from retrieval_attn.errors import ConfigError, InputDataError, RetrievalAttentionError, UnsupportedModelError
from retrieval_attn.memory.routed import RoutedExperts
from retrieval_attn.memory.tower import TowerShape, tower_shape
from retrieval_attn.model.bundled import model_path
from retrieval_attn.model.checkpoint import heads_config, reason, require_reachable, require_sizes
from retrieval_attn.model.gguf.file import read, resolve
from retrieval_attn.model.rope import max_positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KEPT_SHAPES = 32


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. Bytes are of one sequence; layers without a growing cache count in no KV figure.

    full_layers: layers that attend to everything; sliding_layers: those that keep `sliding_window` tokens.
    active_parameters: read per generated token: without the input embedding and the experts that are not visited.
    mlp_width: widest MLP activation per token: intermediate size, or of all experts that one token visits.
    embedding_parameters: of the input embedding; head_parameters: of the output's, 0 where it is the same table.
    ranks_split_heads: whether transformers' tensor parallel gives every rank its own key-value heads.
    rotary_numbers: cosines and sines per token. state_layers: layers that keep a state of `state_layer_bytes` instead
    of keys (0 bytes where the config does not say how large it is); a token that goes through one takes
    `state_chunk_bytes` (0: not known). hidden_movable: whether hidden states may lie on the host while a model of one
    device reads. host_table_bytes: of an input embedding in host memory, which weight_bytes does not count. kv_heads,
    key_dim, value_dim: of full layers; sliding_elements: numbers of keys and values per token of a sliding layer, 0 if
    as many as of a full one. tower: of images; None: images are not served. routed: experts that may be in host memory.
    quantized: weights are in 4 bits or as a quantised checkpoint has them, and no smaller form can be chosen.
    """

    name: str
    model_type: str
    dtype: str
    dtype_bytes: int
    parameters: int
    active_parameters: int
    weight_bytes: int
    weights_note: str
    layers: int
    full_layers: int
    sliding_layers: int
    sliding_window: int
    hidden: int
    mlp_width: int
    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    vocab: int
    max_positions: int | None
    embedding_parameters: int
    head_parameters: int
    ranks_split_heads: bool
    rotary_numbers: int
    state_layers: int = 0
    state_layer_bytes: int = 0
    state_chunk_bytes: int = 0
    hidden_movable: bool = True
    host_table_bytes: int = 0
    sliding_elements: int = 0
    tower: TowerShape | None = None
    routed: RoutedExperts | None = None
    quantized: bool = False

    @property
    def host_weight_bytes(self) -> int:
        """Bytes of the input embedding and of experts in host memory."""
        return self.host_table_bytes + (0 if self.routed is None else self.routed.host_bytes)

    @property
    def states_bytes(self) -> int:
        """Bytes of the layers that keep a state instead of keys, of one sequence."""
        return self.state_layers * self.state_layer_bytes

    @property
    def kv_elements(self) -> int:
        """Numbers of keys and values per token and layer."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def sliding_layer_bytes(self) -> int:
        """Bytes of keys and values per token and sliding layer in the model's dtype."""
        return (self.sliding_elements or self.kv_elements) * self.dtype_bytes

    @property
    def kv_layer_bytes(self) -> int:
        """Bytes of keys and values per token and layer in the model's dtype."""
        return self.kv_elements * self.dtype_bytes


def model_shape(source: Any, dtype: Any = None, quantization: str | None = None) -> ModelShape:
    """Sizes of `source`: a model, a PreTrainedConfig, a folder, or a hub name in the local cache.

    dtype: of weights and KV; None takes the config's own, else bfloat16. quantization: that a model would be loaded
    with, see `LLM`; None: as the checkpoint says. Nothing is downloaded.
    Raises InputDataError (no such model here), UnsupportedModelError (not a decoder), ConfigError (dtype).
    """
    from torch import nn

    from retrieval_attn.model.adapters import unwrapped

    if isinstance(source, nn.Module):
        if quantization is not None:
            raise ConfigError(
                "quantization applies when a model is loaded, but this model is loaded already; leave it out."
            )
        return _of_model(unwrapped(source), dtype)
    config = load_config(source)
    key = _key_of(config, dtype) if config is source and quantization is None else None
    if key is not None and key in _shapes:
        return _shapes[key]
    shape = _of_config(source, config, dtype, quantization)
    if key is not None:
        while len(_shapes) >= KEPT_SHAPES:
            _shapes.pop(next(iter(_shapes)), None)
        _shapes[key] = shape
    return shape


_shapes: dict[Hashable, ModelShape] = {}
"""Of configs that were asked about, the oldest first. Every read on a GPU asks three times, and to build a model of 32
layers without storage is half a second of Python's lock with torch 2.11."""


def _key_of(config: PreTrainedConfig, dtype: Any) -> Hashable:
    """Equal for configs that say the same; None for one that cannot be written."""
    try:
        return type(config), config.name_or_path, config.to_json_string(use_diff=False), str(dtype)
    except (TypeError, ValueError):
        return None


def _of_config(source: Any, config: PreTrainedConfig, dtype: Any, quantization: str | None) -> ModelShape:
    from retrieval_attn.memory.weights import named_bytes, quantized_bytes, routed_experts, stored_bytes, unpacked_note
    from retrieval_attn.model.quantization import own_method

    require_sizes(config, source if isinstance(source, str | Path) else config.model_type)
    name = str(source) if isinstance(source, str | Path) else (config.name_or_path or config.model_type)
    model = _on_meta(config)
    parameters = sum(weight.numel() for weight in model.parameters())
    kind, width = _dtype(dtype, config)
    weight_bytes = parameters * width
    note = f"{_millions(parameters)} parameters in {kind}{unpacked_note(source)}"
    own = getattr(config, "quantization_config", None)
    if (
        own is not None
        and own_method(config) == "gguf"
        and own["form"] == "tiles"
        and (kind != "bfloat16" or not own["weights"])
    ):
        own = None  # unpacked then
    if quantization is not None and own is not None:
        raise ConfigError(
            f"quantization={quantization!r} was given, but {name} is quantised already ({own_method(config)}); leave "
            "it out."
        )
    if quantization is not None:
        weight_bytes, note = named_bytes(model, quantization, width)
    elif own is not None:
        weight_bytes, note = quantized_bytes(model, own, width, stored_bytes(source))
    shape = _shape(config, model, name, kind, width, parameters, weight_bytes, note)
    routed = routed_experts(model, config.get_text_config(decoder=True), quantization, own)
    shape = replace(shape, routed=routed, quantized=own is not None or quantization == "int4")
    return _with_tower(shape, config, model, source if isinstance(source, str | Path) else config.name_or_path)


def load_config(source: Any) -> PreTrainedConfig:
    """Return the config of a folder, a GGUF file, a hub name or "bundled", or `source` itself if it is one.

    Of a hub name that is not cached, config.json alone is downloaded. Raises InputDataError.
    """
    from transformers import AutoConfig, PreTrainedConfig

    if isinstance(source, PreTrainedConfig):
        return source
    if not isinstance(source, str | Path):
        raise ConfigError(
            "plan needs a model, a config, a folder or the name of a model on the Hugging Face hub, "
            f"got {type(source).__name__}."
        )
    try:
        gguf = resolve(model_path(source), download=False)
        if gguf is not None:
            from retrieval_attn.model.gguf.checkpoint import config_of

            config: PreTrainedConfig = config_of(read(gguf))
            return config
        require_reachable(model_path(source))
        return AutoConfig.from_pretrained(model_path(source), trust_remote_code=False)
    except RetrievalAttentionError:
        raise
    except Exception as error:  # a damaged file makes transformers raise nearly everything
        raise InputDataError(
            f"model {source}: its config could not be read ({reason(error)}); give a folder that has a config.json, "
            "or the name of a model on the Hugging Face hub, whose config.json is downloaded."
        ) from error


def _of_model(model: Any, dtype: Any) -> ModelShape:
    from retrieval_attn.memory.weights import copy_note
    from retrieval_attn.model.placement import is_host_table
    from retrieval_attn.model.quantization import held_bytes, unpacked_bytes

    config = getattr(model, "config", None)
    if config is None:
        raise ConfigError(f"plan needs a transformers model, got {type(model).__name__} without a config.")
    parameters = sum(weight.numel() for weight in model.parameters())
    kind, width = _dtype(dtype if dtype is not None else model.dtype, config)
    copied = unpacked_bytes(model)
    if dtype is None:
        held, note = held_bytes(model) + copied, f"as loaded{copy_note(copied)}"
    else:
        held, note = parameters * width, f"{_millions(parameters)} parameters in {kind}"
    name = config.name_or_path or config.model_type
    table: Any = model.get_input_embeddings().weight
    on_host = table.nbytes if dtype is None and is_host_table(table) else 0
    shape = _shape(config, model, name, kind, width, parameters, held, note)
    quantized = dtype is None and held + on_host < parameters * width
    shape = replace(shape, host_table_bytes=on_host, quantized=quantized)
    return _with_tower(shape, config, model, config.name_or_path)


def _with_tower(shape: ModelShape, config: PreTrainedConfig, model: Any, source: Any) -> ModelShape:
    """Return the shape with the tower of a model whose images are served. source: name or folder of the checkpoint."""
    from retrieval_attn.model.multimodal import is_multimodal, text_decoder

    if not is_multimodal(model):
        return shape
    text = shape.head_parameters + sum(weight.numel() for weight in text_decoder(model).parameters())
    tower = tower_shape(config, source, shape.dtype_bytes, shape.parameters - text)
    if tower is None:
        return shape
    note = f"{shape.weights_note}, {_millions(tower.parameters)} parameters of them for images"
    return replace(shape, tower=tower, weights_note=note)


def _shape(
    config: PreTrainedConfig,
    model: PreTrainedModel,
    name: str,
    kind: str,
    width: int,
    parameters: int,
    weight_bytes: int,
    note: str,
) -> ModelShape:
    from transformers.cache_utils import get_layer_types_and_kwargs

    from retrieval_attn.memory.weights import rotary_numbers, state_chunk_bytes
    from retrieval_attn.model.placement import why_never_on_host

    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{config.model_type} is an encoder-decoder; plan serves decoders only.")
    types, options = get_layer_types_and_kwargs(text)
    full = sum(kind_of == "full_attention" for kind_of in types)
    sliding = sum(kind_of in ("sliding_attention", "chunked_attention") for kind_of in types)
    q_heads, heads, near = text.num_attention_heads, heads_config(text), heads_config(text, "sliding_attention")
    key_dim = getattr(heads, "head_dim", None) or text.hidden_size // q_heads
    near_dim = getattr(near, "head_dim", None) or key_dim
    embedding, head = _tables(model, text)
    return ModelShape(
        name=name,
        model_type=text.model_type,
        dtype=kind,
        dtype_bytes=width,
        parameters=parameters,
        active_parameters=_active(model, text, parameters),
        weight_bytes=weight_bytes,
        weights_note=note,
        layers=text.num_hidden_layers,
        full_layers=full,
        sliding_layers=sliding,
        sliding_window=int(options.get("sliding_window") or 0),
        hidden=text.hidden_size,
        mlp_width=_mlp_width(text),
        q_heads=q_heads,
        kv_heads=getattr(heads, "num_key_value_heads", None) or q_heads,
        key_dim=key_dim,
        value_dim=getattr(text, "v_head_dim", None) or key_dim,
        sliding_elements=0 if near is heads else 2 * near_dim * (getattr(near, "num_key_value_heads", None) or q_heads),
        vocab=text.vocab_size,
        max_positions=max_positions(text),
        embedding_parameters=embedding,
        head_parameters=head,
        ranks_split_heads=splits_heads(text),
        rotary_numbers=rotary_numbers(model, key_dim),
        state_layers=sum(kind_of in ("linear_attention", "conv") for kind_of in types),
        state_layer_bytes=_state_bytes(text, width),
        state_chunk_bytes=state_chunk_bytes(model, text, width),
        hidden_movable=why_never_on_host(model) is None,
    )


def _tables(model: PreTrainedModel, text: PreTrainedConfig) -> tuple[int, int]:
    """Parameters of the input embedding, and of the output's unless it is the same table."""
    table: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    ties = getattr(text, "tie_word_embeddings", getattr(model.config, "tie_word_embeddings", False))
    tied = head is not None and (head.weight is table.weight or ties)
    return table.weight.numel(), 0 if tied or head is None else head.weight.numel()


def _state_bytes(text: PreTrainedConfig, width: int) -> int:
    """Bytes of one layer's state: the last inputs of its convolution, and a float32 matrix per head."""
    kernel = getattr(text, "linear_conv_kernel_dim", None)
    if kernel:  # gated delta rule (Qwen3-Next)
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        return int((2 * keys + values) * kernel * width + values * text.linear_key_head_dim * 4)
    if getattr(text, "conv_L_cache", None):  # short convolution (LFM2)
        return int(text.hidden_size * text.conv_L_cache * width)
    if getattr(text, "mamba_num_heads", None) and getattr(text, "ssm_state_size", None):  # Mamba-2 (Nemotron-H)
        inner = text.mamba_num_heads * text.mamba_head_dim
        taken = inner + 2 * text.n_groups * text.ssm_state_size
        return int(taken * text.conv_kernel * width + inner * text.ssm_state_size * 4)
    return 0


def splits_heads(text: PreTrainedConfig) -> bool:
    """Whether transformers' tensor parallel plan for this decoder gives every rank its own key-value heads.

    Some models have no such plan (GPT-OSS), some gather all heads on every rank (Phi-3).
    """
    plan = getattr(text, "base_model_tp_plan", None) or {}
    return all(plan.get(f"layers.*.self_attn.{name}") == "colwise" for name in ("q_proj", "k_proj", "v_proj"))


def _active(model: PreTrainedModel, text: PreTrainedConfig, parameters: int) -> int:
    """Parameters that one generated token reads: those of the text decoder."""
    from retrieval_attn.model.layers import expert_counts
    from retrieval_attn.model.multimodal import is_multimodal, text_decoder

    table, head = _tables(model, text)
    if is_multimodal(model):
        parameters = head + sum(weight.numel() for weight in text_decoder(model).parameters())
    active = parameters - (table if head else 0)
    visited, experts = expert_counts(text)
    if visited and experts:
        routed = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
        active -= routed - routed * visited // experts
    return active


def _millions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} G" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def _mlp_width(text: PreTrainedConfig) -> int:
    from retrieval_attn.model.layers import expert_counts

    dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    visited, experts = expert_counts(text)
    if not visited or not experts:
        return dense
    expert = getattr(text, "moe_intermediate_size", None) or dense
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    # outputs of all experts are kept until they are summed; three activations are counted for a number of this width
    return max(visited * expert + shared, visited * text.hidden_size // 2)


def _dtype(dtype: Any, config: PreTrainedConfig) -> tuple[str, int]:
    """Name and bytes of the dtype to count with."""
    if dtype is None or dtype == "auto":
        dtype = config.get_text_config(decoder=True).dtype or config.dtype or "bfloat16"
    kind = str(dtype).removeprefix("torch.")
    if kind not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}.")
    return kind, DTYPE_BYTES[kind]


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of `config` without storage. A quantised model is built as its unquantised self."""
    import torch

    from retrieval_attn.model.multimodal import model_class

    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    try:
        with torch.device("meta"):
            return model_class(plain).from_config(plain)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{config.model_type}: transformers has no causal language model of this type ({error})."
        ) from error
    except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise InputDataError(
            f"The config of {config.name_or_path or config.model_type!r} describes no model that can be built "
            f"({reason(error)}); restore its config.json."
        ) from error


SPLITS = ("layers", "heads")


def part_of(shape: ModelShape, gpus: int, split: str) -> ModelShape:
    """Return the part of `shape` on the GPU that holds most, if `gpus` share it by `split`.

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
    """Return the checked place of the input embedding. alone: whether the model is on one device.

    Raises ConfigError for an unknown place, and for "host" if several devices share the model.
    """
    if place not in get_args(Place):
        raise ConfigError(f"embedding must be one of {', '.join(get_args(Place))}; got {place!r}.")
    if place == "host" and not alone:
        raise ConfigError("embedding='host' needs a model on one GPU, but this plan has several; leave it out.")
    found: Place = place
    return found if alone else "device"


def with_embedding(shape: ModelShape, place: Place, device_limit: int) -> ModelShape:
    """Return the shape of a model on one GPU whose input embedding is stored at `place`.

    "auto": host memory if weights take more than half of the GPU, unless the output uses the same table. Raises
    ConfigError for "host" if the output uses the same table.
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


def with_host_experts(shape: ModelShape, on_host: int) -> ModelShape:
    """Return the shape with this number of each layer's experts in host memory."""
    routed = shape.routed
    if routed is None or routed.on_host == on_host:
        return shape
    moved = replace(routed, on_host=on_host)
    note = f"{shape.weights_note.removesuffix(routed.note)}{moved.note}"
    held = shape.weight_bytes - routed.device_bytes + moved.device_bytes
    return replace(shape, weight_bytes=held, weights_note=note, routed=moved)


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
