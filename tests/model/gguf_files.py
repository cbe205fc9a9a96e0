"""Tiny GGUF files, written by the package `gguf`, and the models of transformers that they were made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Bytes at which blocks have float16 numbers, of formats that the package reads and does not write."""
TOKENS = 320
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Family:
    """name: of the architecture in a file. model: class of transformers' model. config: fields of its config.

    metadata: keys of a file beyond the usual ones. block: format of the matrices.
    """

    name: str
    model: str
    block: str
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}-{self.block}"


SIZES: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def blocks(weights: np.ndarray, name: str, rng: np.random.Generator) -> np.ndarray:
    """The bytes (..., bytes of a row) of matrices in a format: rounded weights, or random ones."""
    kind = gguf.GGMLQuantizationType[name]
    if name not in HALVES:
        found: np.ndarray = gguf.quants.quantize(weights, kind)
        return found
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    made = rng.integers(0, 256, (weights.size // size, nbytes), dtype=np.uint8)
    for at in HALVES[name]:
        scales = rng.uniform(1e-4, 4e-4, len(made)).astype(np.float16)
        made[:, at : at + 2] = scales[:, None].view(np.uint8)
    return made.reshape(*weights.shape[:-1], -1)


class Writer:
    """A file in the making, and the weights that a reader should find."""

    def __init__(self, path: Path, family: Family) -> None:
        self.writer = gguf.GGUFWriter(path, family.name)
        self.family, self.rng = family, np.random.default_rng(0)

    def add(self, name: str, weights: Tensor, block: str | None) -> Tensor:
        """Store weights in a format, None: as float32, and return what is stored in float32."""
        numbers = weights.detach().float().contiguous().numpy()
        if block in (None, "F16"):
            stored = numbers.astype(np.float16 if block else np.float32)
            self.writer.add_tensor(name, stored)
            return torch.from_numpy(stored.astype(np.float32))
        kind = gguf.GGMLQuantizationType[block]
        made = blocks(numbers, str(block), self.rng)
        self.writer.add_tensor(name, made, raw_dtype=kind)
        rows = gguf.quants.dequantize(made.reshape(-1, made.shape[-1]), kind)
        return torch.from_numpy(rows.reshape(numbers.shape).astype(np.float32))

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def paired(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys as convert_hf_to_gguf.py permutes those of Llama."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def halved(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `paired`, by a search for each row."""
    order = paired(torch.arange(len(rows)), heads)
    return rows[torch.stack([(order == row).nonzero()[0, 0] for row in range(len(rows))])]


def write(path: Path, family: Family, *, tokenizer: bool = True) -> Any:
    """Write a file, and return the model of transformers with the weights that are stored, float32."""
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, family.model)
    config = cls.config_class(**{**SIZES, **family.config})
    config._attn_implementation = "eager"
    model = cls(config).eval()
    file = Writer(path, family)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tied = config.tie_word_embeddings
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # all the same otherwise, or zero
                weight.copy_((weight + torch.randint(-8, 9, weight.shape) / 64).contiguous())
            if ".experts." in name:
                _add_experts(file, name, weight)
                continue
            stem, _, suffix = name.rpartition(".")
            if suffix == "sinks":
                stem, suffix = name, "weight"
            stored_name = f"{names.get_name(stem)}.{suffix}"
            assert not stored_name.startswith("None"), name
            routes = stem.endswith(("mlp.gate", "mlp.router"))  # in float32, as convert_hf_to_gguf.py stores it
            block = None if routes or weight.ndim == 1 else family.block
            leaf = stem.rpartition(".")[2]
            if family.name.startswith("gemma") and weight.ndim == 1:
                weight.copy_(file.add(stored_name, weight + 1, block) - 1)
            elif family.name == "llama" and leaf in heads:
                weight.copy_(halved(file.add(stored_name, paired(weight, heads[leaf]), block), heads[leaf]))
            else:
                weight.copy_(file.add(stored_name, weight, block))
    if tied:
        model.tie_weights()
    _add_metadata(file, family, config)
    if tokenizer:
        add_tokenizer(file.writer)
    for key, value in family.metadata.items():
        if isinstance(value, np.ndarray):
            file.writer.add_tensor(key, value)
    file.close()
    return model


def _add_experts(file: Writer, name: str, weight: Tensor) -> None:
    """Qwen's (experts, out, in), gate before up; GPT-OSS's (experts, in, out), gate and up in turn."""
    layer, part = name.split(".")[2], name.rpartition(".")[2]
    bias, turned = part.endswith("_bias"), file.family.name == "gpt-oss"
    block = None if bias else file.family.block

    def add(which: str, numbers: Tensor) -> Tensor:
        turn = turned and not bias
        stored = numbers.swapaxes(1, 2) if turn else numbers
        found = file.add(f"blk.{layer}.ffn_{which}_exps.{'bias' if bias else 'weight'}", stored, block)
        return found.swapaxes(1, 2) if turn else found

    if part.startswith("down"):
        weight.copy_(add("down", weight))
    elif turned:
        weight[..., ::2] = add("gate", weight[..., ::2])
        weight[..., 1::2] = add("up", weight[..., 1::2])
    else:
        half = weight.shape[1] // 2
        weight[:, :half], weight[:, half:] = add("gate", weight[:, :half]), add("up", weight[:, half:])


def _add_metadata(file: Writer, family: Family, config: Any) -> None:
    writer = file.writer
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in family.metadata.items():
        full = f"{family.name}.{key}"
        if isinstance(value, bool | str):
            (writer.add_string if isinstance(value, str) else writer.add_bool)(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)


def add_tokenizer(writer: Any) -> None:
    """Byte-level BPE of TOKENS tokens: 256 bytes, some merges, special tokens first."""
    from tokenizers.pre_tokenizers import ByteLevel

    special = ["<pad>", "<s>", "</s>", "<|call|>"]
    merges = ["Ġ t", "h e", "Ġt he", "i n", "e r", "Ġ a", "o n", "Ġ s"]
    tokens = [*special, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    tokens += [f"<unused{number}>" for number in range(TOKENS - len(tokens))]
    kinds = [3 if token in special else 4 if token.startswith("<unused") else 1 for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
