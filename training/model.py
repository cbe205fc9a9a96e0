"""Llama-shaped decoder for training and checking; its state dict has the Hugging Face names.

Not a general model: no dropout, no attention bias, tied embeddings, causal attention, right-padded batches.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes under the names of a Hugging Face Llama config."""

    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    max_position_embeddings: int = 131072


class Norm(nn.Module):
    """RMS norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split layout.  x: (batch, heads, n, d); cos, sin: (batch, 1, n, d)."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (batch, q_heads, n, d), keys, values (batch, kv_heads, n, d); q and k are rotated."""
        batch, n, _ = x.shape
        q, k, v = (
            layer(x).view(batch, n, -1, self.shape.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, heat: Tensor) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        q = q * heat.to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, heat: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, heat)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class TinyLlama(nn.Module):
    """Causal language model; logits are computed only where they are asked for."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = 0.02 if not name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02 / 3.0
                nn.init.normal_(weight, std=scale)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (batch, 1, n, head_dim), float32, of positions (batch, n)."""
        dim = self.shape.head_dim
        steps = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
        phase = positions[:, None, :, None].float() * (self.shape.rope_theta**-steps)
        phase = torch.cat((phase, phase), dim=-1)
        return phase.cos(), phase.sin()

    def hidden(self, ids: Tensor, positions: Tensor, heat: Tensor | None = None) -> Tensor:
        """Final normalised states (batch, n, hidden) of ids (batch, n).

        heat: (batch, 1, 1, 1) factor on all attention scores. Below 1 a short context blurs attention as a
        longer one would, so that the model learns wider margins than its own length asks for.
        """
        if heat is None:
            heat = torch.ones(len(ids), 1, 1, 1, device=ids.device)
        x = self.model.embed_tokens(ids)
        cos, sin = self.angles(positions)
        for layer in self.model.layers:
            x = layer(x, cos, sin, heat)
        return self.model.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.model.embed_tokens.weight.to(states.dtype))

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], max_new: int, eos: int) -> list[list[int]]:
        """Greedy continuation of a right-padded batch up to `eos` (not returned) or max_new tokens."""
        device = self.model.embed_tokens.weight.device
        sizes = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest, batch = int(sizes.max()), len(prompts)
        ids = torch.zeros(batch, longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        x = self.model.embed_tokens(ids.to(device))
        cos, sin = (t.to(x.dtype) for t in self.angles(torch.arange(longest, device=device)[None].expand(batch, -1)))
        caches: list[tuple[Tensor, Tensor]] = []
        heads, kv_heads, dim = (self.shape.num_attention_heads, self.shape.num_key_value_heads, self.shape.head_dim)
        blocks: list[Any] = list(self.model.layers)
        for layer in blocks:
            attn = layer.self_attn
            q, k, v = attn.project(layer.input_layernorm(x), cos, sin)
            caches.append(tuple(F.pad(t, (0, 0, 0, max_new)) for t in (k, v)))  # type: ignore[arg-type]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + attn.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        rows = torch.arange(batch, device=device)
        token = self.logits(self.model.norm(x[rows, sizes - 1])).argmax(-1)
        out_ids = [token]
        slots = torch.arange(longest + max_new, device=device)
        for step in range(max_new - 1):
            at = sizes + step
            x = self.model.embed_tokens(token)[:, None]
            cos, sin = (t.to(x.dtype) for t in self.angles(at[:, None]))
            hide = slots[None, :] > at[:, None]
            for layer, (keys, values) in zip(blocks, caches, strict=True):
                attn = layer.self_attn
                q, k, v = attn.project(layer.input_layernorm(x), cos, sin)
                keys[rows, :, at], values[rows, :, at] = k[:, :, 0], v[:, :, 0]
                grouped = q.view(batch, kv_heads, heads // kv_heads, dim)
                scores = (grouped @ keys.transpose(2, 3)).float() * dim**-0.5
                weights = scores.masked_fill(hide[:, None, None], -torch.inf).softmax(-1)
                x = x + attn.o_proj((weights.to(values.dtype) @ values).reshape(batch, 1, heads * dim))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            token = self.logits(self.model.norm(x[:, 0])).argmax(-1)
            out_ids.append(token)
            if step % 8 == 7 and bool((torch.stack(out_ids) == eos).any(0).all()):
                break
        table = torch.stack(out_ids, 1).tolist()
        return [row[: row.index(eos)] if eos in row else row for row in table]


def save(model: TinyLlama, folder: Path) -> None:
    """Write config.json, generation_config.json and bf16 model.safetensors in Hugging Face layout."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    shape = asdict(model.shape)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape["rope_theta"]},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        **special,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {**special, "do_sample": False, "max_new_tokens": 64}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def load(folder: Path, device: str, dtype: torch.dtype) -> TinyLlama:
    """Model of a folder in Hugging Face Llama layout (tied embeddings only)."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    names = Shape.__dataclass_fields__
    model = TinyLlama(Shape(**{name: config[name] for name in names if name in config}))
    weights = {k: v for k, v in load_file(folder / "model.safetensors").items() if k != "lm_head.weight"}
    model.load_state_dict(weights)
    return model.to(device, dtype)
