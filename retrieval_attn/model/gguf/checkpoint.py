"""Config and weights of a GGUF file as transformers has them: names, layouts and options of each architecture.

The names are those of llama.cpp's gguf-py/gguf/tensor_mapping.py, the layouts those of its convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.errors import InputDataError, UnsupportedModelError
from retrieval_attn.gpu import packed_experts
from retrieval_attn.gpu.packed_experts import ExpertShape
from retrieval_attn.model.experts import Experts, ExpertWeights, stored_experts
from retrieval_attn.model.gguf.blocks import (
    BFLOAT16,
    BFLOAT16_STORAGE,
    BLOCKS,
    FLOATS,
    BlockFormat,
    block_format,
    block_names,
)
from retrieval_attn.model.gguf.file import GgufFile, StoredTensor
from retrieval_attn.model.grouped import GroupedMatrix, packed_bytes
from retrieval_attn.model.placed_experts import pack_placed
from retrieval_attn.model.quantization import own_method, require_package
from retrieval_attn.model.stored import Storage, StoredWeight

METHOD = "gguf"
"""quant_method of a config whose matrices may stay in few bits, see `settled`."""
TILES, STORED = "tiles", "stored"
"""Forms of matrices that stay in few bits: of `GroupedMatrix.packed` on a GPU, of `StoredWeight` on a CPU."""
FOUR_BITS, GROUP = ("Q4_0", "Q4_1", "Q4_K"), 32
"""Formats of 4-bit numbers, of which GROUP have one scale and offset."""

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_EXPERTS = {"ffn_gate_exps": "mlp.experts.gate_up_proj", "ffn_down_exps": "mlp.experts.down_proj"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that the config contains."""


@dataclass(frozen=True)
class _Architecture:
    """An architecture in transformers' terms.

    names: of modules of a layer, in addition to _LAYER. moved: weights of norms are stored plus 1. paired: rows of
    queries and keys are stored in pairs that rotate together. interleaved: an expert's gate and up alternate, and its
    matrices are transposed. options: fields of the config by key of the metadata. fixed: further fields.
    """

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    moved: bool = False
    paired: bool = False
    interleaved: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_SLIDING = {"attention.sliding_window": "sliding_window"}
_ROUTED = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
ARCHITECTURES = {
    "llama": _Architecture("llama", paired=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "qwen3moe": _Architecture(
        "qwen3_moe",
        names={"ffn_gate_inp": "mlp.gate", **_EXPERTS},
        options={**_ROUTED, "expert_feed_forward_length": "moe_intermediate_size"},
        fixed={"norm_topk_prob": True},
    ),
    "gemma2": _Architecture(
        "gemma2",
        names=_GEMMA,
        moved=True,
        options={
            **_SLIDING,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3": _Architecture("gemma3_text", names=_GEMMA, moved=True, options=_SLIDING),
    "phi3": _Architecture("phi3", names=_FUSED),
    "gpt-oss": _Architecture(
        "gpt_oss",
        names={
            **_EXPERTS, "ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
        },
        interleaved=True,
        options={**_ROUTED, **_SLIDING, "expert_feed_forward_length": "intermediate_size"},
    ),
    "glm4": _Architecture(
        "glm4",
        names={
            "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
}  # fmt: skip
"""By name in the file. Mistral's models and Yi are stored as "llama"."""


def config_of(file: GgufFile) -> Any:
    """Return the transformers config of the model in `file`.

    Raises UnsupportedModelError for an architecture or rotary scaling that is not supported, and InputDataError for
    a file that lacks metadata.
    """
    from transformers import AutoConfig

    known = _architecture(file)
    try:
        heads, hidden = int(file.get("attention.head_count")), int(file.get("embedding_length"))
        sizes = {
            "hidden_size": hidden,
            "num_hidden_layers": int(file.get("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(file.get("attention.head_count_kv", heads)),
            "head_dim": int(file.get("attention.key_length", hidden // heads)),
            "intermediate_size": int(file.get("feed_forward_length") or hidden),
            "max_position_embeddings": int(file.get("context_length")),
            "rms_norm_eps": float(file.get("attention.layer_norm_rms_epsilon", 1e-6)),
            "vocab_size": file.tensors[_EMBEDDING].shape[0],
        }
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputDataError(
            f"{file.path} lacks sizes of a model ({error}); it has {len(file.tensors)} tensors and may be a part of a "
            "model, such as a projector of images."
        ) from error
    matrices = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    fields = {
        **sizes,
        **known.fixed,
        **{option: file.get(key) or None for key, option in known.options.items() if file.get(key) is not None},
        **_positions(file, known, sizes),
        **_own_fields(file, known, sizes),
        "tie_word_embeddings": _HEAD not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _stop_tokens(file) or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        # bfloat16 for float16, too: the range of bfloat16 is that of the checkpoints that files were made of
        "dtype": torch.float32 if matrices == {0} else torch.bfloat16,
    }
    config = AutoConfig.for_model(known.model_type, **fields)
    packed = [stored.shape for stored in file.tensors.values() if _is_packable(stored)]
    kept = [(storage, stored.shape) for stored in file.tensors.values() if (storage := _storage(stored)) is not None]
    tiles, stored = (_expert_sizes(file, form) for form in (TILES, STORED))
    if packed or kept or tiles.weights or stored.weights:
        experts = kept_experts(file, TILES)
        floats = {block_format(parts[0]).storage.floats for parts in experts.values()}
        counts = [math.prod(shape) for shape in packed]
        config.quantization_config = {
            "quant_method": METHOD, "form": TILES, "weights": sum(counts) + tiles.weights,
            "largest": max([*counts, tiles.largest]),
            "bytes": sum(packed_bytes(rows, columns, GROUP) for rows, columns in packed) + tiles.nbytes,
            "group": GROUP, "experts": len(experts), "floats": floats == {True}, "mixed": len(floats) > 1,
            STORED: {
                "quant_method": METHOD, "form": STORED,
                "weights": sum(math.prod(shape) for _, shape in kept) + stored.weights, "largest": 0,
                "bytes": sum(storage.nbytes(*shape) for storage, shape in kept) + stored.nbytes,
            },
        }  # fmt: skip
    config.name_or_path = file.path
    return config


def _is_packable(stored: StoredTensor) -> bool:
    """Return True for a matrix of a linear layer in FOUR_BITS; output, embedding and router are none."""
    linear = len(stored.shape) == 2 and stored.name not in (_EMBEDDING, _HEAD) and "ffn_gate_inp" not in stored.name
    return linear and stored.kind in BLOCKS and BLOCKS[stored.kind].name in FOUR_BITS


def _storage(stored: StoredTensor) -> Storage | None:
    """Return how a CPU stores the matrix of a linear layer, the output or the embedding; None: it is unpacked."""
    if len(stored.shape) != 2 or "ffn_gate_inp" in stored.name:
        return None
    kind = stored.kind
    storage = BFLOAT16_STORAGE if kind == BFLOAT16 else BLOCKS[kind].storage if kind in BLOCKS else None
    return storage if storage is not None and storage.can_store(*stored.shape) else None


class _ExpertSizes(NamedTuple):
    """Weights of experts that stay in few bits, their bytes, and weights of the largest copies at once."""

    weights: int
    nbytes: int
    largest: int


def _expert_sizes(file: GgufFile, form: str) -> _ExpertSizes:
    weights = nbytes = largest = 0
    for parts in kept_experts(file, form).values():
        shape = _joined_shape(parts)
        weights += math.prod(shape)
        largest = max(largest, shape.out * shape.columns * shape.copied)
        if form == STORED:
            nbytes += block_format(parts[0]).storage.nbytes(shape.experts * shape.out, shape.columns)
        else:
            nbytes += packed_experts.packed_bytes(shape, GROUP)
    return _ExpertSizes(weights, nbytes, largest)


def _joined_shape(parts: list[StoredTensor]) -> ExpertShape:
    """Return the sizes of experts whose matrices are joined: gate and up, or down alone."""
    experts, rows, columns = parts[0].shape
    return ExpertShape(experts, rows * len(parts), columns)


def kept_experts(file: GgufFile, form: str) -> dict[str, list[StoredTensor]]:
    """Return the tensors of experts that stay in few bits, by the first one's name: gate and up, and down.

    form: TILES or STORED. All experts of a layer do, or none.
    """
    found: dict[str, list[StoredTensor]] = {}
    for name, gate in file.tensors.items():
        if not name.endswith("ffn_gate_exps.weight"):
            continue
        up, down = (file.tensors.get(name.replace("gate", part)) for part in ("up", "down"))
        if up is None or down is None:
            continue
        parts = {name: [gate, up], down.name: [down]}
        if (gate.kind, gate.shape) == (up.kind, up.shape) and all(_can_keep(own, form) for own in parts.values()):
            found |= parts
    return found


def _can_keep(parts: list[StoredTensor], form: str) -> bool:
    """Return True if kernels multiply the matrices of experts in their form."""
    shape, block = _joined_shape(parts), BLOCKS.get(parts[0].kind)
    if block is None or shape.columns % block.size or not packed_experts.can_pack(shape.out, shape.columns, GROUP):
        return False
    if form == STORED:
        return block.storage.can_store(shape.experts * shape.out, shape.columns)
    return block.name in FOUR_BITS or block.storage.floats


def unpacked_formats(file: GgufFile, form: str | None) -> list[str]:
    """Return the names of the formats of blocks that are unpacked. form: TILES, STORED, or None: all are.

    Those in which linear layers stay packed are left out, though the embedding may be unpacked.
    """
    if form is None:
        return block_names(file)
    kept = {part.name for parts in kept_experts(file, form).values() for part in parts}
    routed = [one for one in file.tensors.values() if "_exps." in one.name and one.kind not in FLOATS]
    found = {block_format(one).name for one in routed if one.name not in kept}
    others = set(block_names(file)) - {block_format(one).name for one in routed} if form == TILES else set()
    return sorted(found | (others - set(FOUR_BITS)))


def settled(config: Any, device: torch.device, dtype: str, quantization: str | None = None, *, alone: bool) -> Any:
    """Return the config of a GGUF file without its quantization_config, unless matrices stay in few bits.

    Those of 4 bits do in bfloat16 on one GPU of compute capability 8.0 or newer, all do on a CPU with dtype "auto"
    and without a quantization. alone: whether the model is on one device. Other configs are returned as they are.
    """
    if own_method(config) != METHOD:
        return config
    if alone and device.type == "cpu" and dtype == "auto" and quantization is None:
        config.quantization_config = config.quantization_config[STORED]
        return config
    if not config.quantization_config["weights"]:
        del config.quantization_config
        return config
    ready = alone and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    if ready and (dtype == "bfloat16" or (dtype == "auto" and config.dtype == torch.bfloat16)):
        require_package("A GGUF file in 4 bits on a GPU", "torchao")
        return config
    del config.quantization_config
    return config


def _architecture(file: GgufFile) -> _Architecture:
    name = file.architecture
    if name not in ARCHITECTURES or (name == "llama" and file.get("expert_count")):
        what = f"a mixture of experts of the architecture {name!r}" if name in ARCHITECTURES else repr(name)
        raise UnsupportedModelError(
            f"{file.path} has a model of the architecture {what}; GGUF files are supported for "
            f"{', '.join(ARCHITECTURES)}. Load the checkpoint that the file was made of by its folder or hub name."
        )
    return ARCHITECTURES[name]


def _stop_tokens(file: GgufFile) -> list[int]:
    """Return ids of the tokens that end an answer: end of text, of a turn, of a message."""
    names = ("eos",) if file.architecture == "gpt-oss" else ("eos", "eot", "eom")  # its eot ends a channel
    found = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    if file.architecture == "gpt-oss":  # a call of a tool ends an answer, too
        found += [
            number for number, token in enumerate(file.metadata.get("tokenizer.ggml.tokens", ())) if token == "<|call|>"
        ]
    return list(dict.fromkeys(int(token) for token in found if token is not None))


def _own_fields(file: GgufFile, known: _Architecture, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of single architectures."""
    biased = "blk.0.attn_q.bias" in file.tensors
    if known.model_type == "phi3":
        return {
            "sliding_window": file.get("attention.sliding_window") or None,
            "original_max_position_embeddings": int(
                file.get("rope.scaling.original_context_length", sizes["max_position_embeddings"])
            ),
        }
    if known.model_type in ("llama", "qwen3", "qwen3_moe", "glm4", "gpt_oss"):
        return {"attention_bias": biased}
    if known.model_type in ("gemma2", "gemma3_text"):
        # the largest of each divides by the mean width of a head, as llama.cpp recognizes them
        largest = sizes["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[known.model_type]
        mean = sizes["hidden_size"] // sizes["num_attention_heads"]
        return {"query_pre_attn_scalar": mean if largest else sizes["head_dim"]}
    return {}


def _positions(file: GgufFile, known: _Architecture, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary positions. Raises UnsupportedModelError for scaling that transformers lacks."""
    theta = float(file.get("rope.freq_base", 10_000.0))
    whole: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    rotated = int(file.get("rope.dimension_count", sizes["head_dim"]))
    if rotated != sizes["head_dim"]:
        whole["partial_rotary_factor"] = rotated / sizes["head_dim"]
    whole |= _scaling(file, rotated, theta, sizes["max_position_embeddings"])
    if known.model_type == "gpt_oss":
        whole["truncate"] = False
    if known.model_type == "gemma3_text":
        local = {"rope_theta": float(file.get("rope.freq_base_swa", 10_000.0)), "rope_type": "default"}
        return {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}
    return {"rope_parameters": whole}


def _scaling(file: GgufFile, rotated: int, theta: float, positions: int) -> dict[str, Any]:
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, rotated, theta)
    original = file.get("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        found = {
            "rope_type": "longrope",
            "long_factor": _numbers(file, "rope_factors_long.weight"),
            "short_factor": _numbers(file, "rope_factors_short.weight"),
            "original_max_position_embeddings": int(original or positions),
        }
        factor = file.get("rope.scaling.attn_factor")
        return found if factor is None else {**found, "attention_factor": float(factor)}
    kind, factor = file.get("rope.scaling.type", "none"), float(file.get("rope.scaling.factor", 1.0))
    if kind == "none" or factor == 1:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        found = {
            "rope_type": "yarn", "factor": factor,
            "original_max_position_embeddings": int(original or positions / factor),
        }  # fmt: skip
        for key in ("beta_fast", "beta_slow"):
            if (value := file.get(f"rope.scaling.yarn_{key}")) is not None:
                found[key] = float(value)
        return found
    raise UnsupportedModelError(f"{file.path} has rotary positions scaled by {kind!r}; linear and yarn are supported.")


def _llama3(file: GgufFile, rotated: int, theta: float) -> dict[str, Any]:
    """Return Llama 3.1's scaling: a file has its factors, and not the numbers that they were computed from.

    Raises UnsupportedModelError if the usual numbers give other factors.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stored = torch.tensor(_numbers(file, "rope_freqs.weight"))
    found = {
        "rope_type": "llama3", "factor": float(stored.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    example = LlamaConfig(
        hidden_size=rotated, num_attention_heads=1, head_dim=rotated, max_position_embeddings=1 << 17,
        rope_parameters={"rope_theta": theta, **found},
    )  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](example, torch.device("cpu"))
    plain = theta ** -(torch.arange(0, rotated, 2).float() / rotated)
    if scaled.shape != stored.shape or not torch.allclose(plain / scaled, stored, rtol=1e-3):
        raise UnsupportedModelError(
            f"{file.path} has rotary factors (rope_freqs) other than those of Llama 3.1, from {stored.min():g} to "
            f"{stored.max():g}; load the checkpoint that the file was made of."
        )
    return found


def _numbers(file: GgufFile, name: str) -> list[float]:
    found: list[float] = Weight(file.tensors[name], torch.float32, torch.device("cpu"))[...].tolist()
    return found


class Weight:
    """A stored tensor, read and unpacked when transformers' loader indexes it.

    dtype: of unpacked blocks; other tensors keep theirs. device: of the result. change: of its rows, which are bytes or
    numbers. form: return a matrix in few bits, as kernels on a GPU (TILES) or on a CPU (STORED) multiply it.
    Raises InputDataError if the file ends before the tensor, UnsupportedModelError for unknown formats.
    """

    def __init__(
        self,
        stored: StoredTensor,
        dtype: torch.dtype,
        device: torch.device,
        change: Callable[[Tensor], Tensor] | None = None,
        *,
        form: str | None = None,
    ) -> None:
        self._stored, self.dtype, self.device, self._change = stored, dtype, device, change
        self._form = form
        self._blocks = None if stored.kind in FLOATS else block_format(stored)
        columns = stored.shape[-1]
        width = columns * FLOATS[stored.kind].itemsize if self._blocks is None else self._blocks.row_bytes(columns)
        self._shape = *stored.shape[:-1], width
        end, size = stored.start + math.prod(self._shape), os.path.getsize(stored.path)
        if end > size:
            raise InputDataError(
                f"{stored.path} has {size:,} bytes, but tensor {stored.name} ends at {end:,}; the file is incomplete, "
                "download it again."
            )

    def is_floating_point(self) -> bool:
        """Return True, as a floating-point tensor does: transformers keeps the dtype of other tensors."""
        return True

    def __getitem__(self, index: Any) -> Tensor:
        """Return the weight, at an index."""
        rows = self.data().to(self.device)
        rows = rows.view(FLOATS[self._stored.kind]) if self._blocks is None else rows
        rows = rows if self._change is None else self._change(rows)
        if self._blocks is None and self._form == STORED:
            weight = StoredWeight(rows.contiguous(), None, None, dtype=self.dtype, floats=False)
            return torch.nn.Parameter(weight, requires_grad=False)
        if self._blocks is None:
            return rows[index]
        if self._form is not None:
            stored = self._form == STORED
            weight = self._blocks.stored(rows, self.dtype) if stored else self._blocks.matrix(rows).packed()
            return torch.nn.Parameter(weight, requires_grad=False)
        return self._blocks.weights(rows, self.dtype)[index]

    def data(self) -> Tensor:
        """Return the bytes of the file, uint8, mapped."""
        return torch.from_numpy(np.memmap(self._stored.path, np.uint8, "c", self._stored.start, self._shape))


class _Experts:
    """Experts that stay in few bits, read when transformers' loader indexes them.

    parts: gate and up, or down. interleaved: see `_Architecture`. host_experts: see `weights_of`. weight: Weight of a
    part. form: TILES or STORED.
    """

    def __init__(
        self, parts: list[StoredTensor], weights: list[Weight], form: str, *, interleaved: bool, host_experts: int
    ) -> None:
        self._parts, self._weights, self._form, self._interleaved = parts, weights, form, interleaved
        self._host_experts = host_experts

    def is_floating_point(self) -> bool:
        """Return True, as `Weight` does."""
        return True

    def __getitem__(self, index: Any) -> Tensor:
        """Return the weights, a parameter."""
        block, shape, device = block_format(self._parts[0]), _joined_shape(self._parts), self._weights[0].device
        held: Experts
        if self._form == TILES:
            held = pack_placed(
                self._matrices(block), shape, GROUP, device, self._host_experts, floats=block.storage.floats
            )
        else:
            held = stored_experts(self._matrices(block), shape, block.storage)
        weight = ExpertWeights(held, dtype=self._weights[0].dtype, transposed=self._interleaved)
        return torch.nn.Parameter(weight, requires_grad=False)

    def _matrices(self, block: BlockFormat) -> Iterator[GroupedMatrix]:
        device = self._weights[0].device
        for data in zip(*(weight.data() for weight in self._weights), strict=True):
            own = [block.kept(rows.to(device)) for rows in data]
            if len(own) > 1 and self._interleaved:
                yield GroupedMatrix(*(torch.stack(fields, dim=1).flatten(0, 1) for fields in zip(*own, strict=True)))
            else:
                yield GroupedMatrix(*(torch.cat(fields) for fields in zip(*own, strict=True)))


class _Joined:
    """Weights of one parameter, joined by `join` when transformers' loader indexes it."""

    def __init__(self, parts: list[Weight], join: Callable[..., Tensor]) -> None:
        self._parts, self._join = parts, join

    def __getitem__(self, index: Any) -> Tensor:
        """Return the joined weight, at an index."""
        return self._join(*(part[...] for part in self._parts))[index]


def weights_of(
    file: GgufFile, config: Any, dtype: torch.dtype, device: torch.device, *, form: str | None, host_experts: int = 0
) -> dict[str, Any]:
    """Return the weights in `file` by parameter of the model of `config`, unread: see `Weight`.

    form: of matrices that stay in few bits, TILES or STORED; None: all are unpacked. See `settled`. host_experts: of
    each layer, in host memory.
    Raises InputDataError and UnsupportedModelError as `Weight`, and for tensors that no parameter corresponds to.
    """
    known, text = _architecture(file), config.get_text_config(decoder=True)
    found: dict[str, Any] = {}
    kept = {} if form is None else kept_experts(file, form)
    heads = {"attn_q": text.num_attention_heads, "attn_k": text.num_key_value_heads}
    for stored in file.tensors.values():
        if _IGNORED.fullmatch(stored.name):
            continue
        stem, _, suffix = stored.name.rpartition(".")
        leaf = stem.rpartition(".")[2]
        name = _parameter(known, stem, suffix)
        if leaf == "ffn_up_exps":  # with ffn_gate_exps
            continue
        if name is None:
            raise UnsupportedModelError(
                f"{file.path} has a tensor {stored.name}, which models of the architecture {file.architecture!r} do "
                "not have in transformers; load the checkpoint that the file was made of."
            )
        if stored.name in kept and form is not None:
            weights = [Weight(one, dtype, device) for one in kept[stored.name]]
            found[name] = _Experts(
                kept[stored.name], weights, form, interleaved=known.interleaved, host_experts=host_experts
            )
        elif leaf == "ffn_gate_exps":
            other = stored.name.replace("gate", "up")
            if other not in file.tensors:
                raise InputDataError(f"{file.path} has no tensor {other}; download the file again.")
            join = _gate_up(known.interleaved, biases=suffix == "bias")
            found[name] = _Joined([Weight(one, dtype, device) for one in (stored, file.tensors[other])], join)
        elif leaf == "ffn_down_exps" and known.interleaved and suffix == "weight":
            found[name] = _Joined([Weight(stored, dtype, device)], _transposed)
        else:
            stays = _storage(stored) is not None if form == STORED else _is_packable(stored)
            found[name] = Weight(stored, dtype, device, _change(known, leaf, heads), form=form if stays else None)
    return found


def _parameter(known: _Architecture, stem: str, suffix: str) -> str | None:
    """Return the parameter of a tensor `stem.suffix`; None if there is none."""
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{suffix}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    module = layer and {**_LAYER, **known.names}.get(layer[2])
    if layer is None or module is None:
        return None
    if module.endswith("sinks") or ".experts." in module:  # parameters of their own, not of a module
        return f"model.layers.{layer[1]}.{module}{'_bias' if suffix == 'bias' else ''}"
    return f"model.layers.{layer[1]}.{module}.{suffix}"


def _change(known: _Architecture, leaf: str, heads: Mapping[str, int]) -> Callable[[Tensor], Tensor] | None:
    if known.moved and leaf.endswith("norm"):
        return lambda rows: rows.float() - 1
    if known.paired and leaf in heads:
        return lambda rows: (
            rows.reshape(heads[leaf], -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape).contiguous()
        )
    return None


def _gate_up(interleaved: bool, *, biases: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that joins gate and up of all experts: (experts, out, in), or biases (experts, out)."""
    if not interleaved:
        return lambda gate, up: torch.cat([gate, up], dim=1)
    if biases:
        return lambda gate, up: torch.stack([gate, up], dim=-1).flatten(1)
    return lambda gate, up: _transposed(torch.stack([gate, up], dim=2).flatten(1, 2))


def _transposed(experts: Tensor) -> Tensor:
    return experts.transpose(1, 2).contiguous()
