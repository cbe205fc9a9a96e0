"""What a context holds, for the decode benchmark: really read by the model, or synthetic keys put in its place.

Reading is the truth and costs a prefill per method. For long contexts of large models keys are synthetic
(`index/synthetic.py`): out of the queries' distribution as real ones are, rotated by the model's own rule. Then the
model's own queries would mean nothing to them, so the benchmark replaces what `q_proj` gives by synthetic queries; the
model rotates them to the position where it decodes. Values are normal random numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from retrieval_attn import RetrievalCache
from retrieval_attn.config import Config
from retrieval_attn.errors import ConfigError
from retrieval_attn.testing import capturable, finish_prefill, forward, using_retrieval
from retrieval_attn_eval.bench.place import fill_watching, place
from retrieval_attn_eval.bench.source import BLOCK, Source, attentions
from retrieval_attn_eval.bench.synthetic import synthetic_heads

BANK = 32
"""Different synthetic queries per head; positions take them in turn."""


@torch.no_grad()
def read(model: Any, config: Config, ids: Tensor) -> tuple[RetrievalCache, Tensor]:
    """One prefill of ids (batch, tokens) as `Context.read` does it; last logits (batch, vocabulary). Indexes may still
    be being built.
    """
    cache = RetrievalCache(model, config)
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    with using_retrieval(model, config.prefill_chunk):
        return cache, forward(model, cache, ids, mask=None, position_ids=positions)


class ReadSource(Source):
    """`ids` (batch, tokens), read by the model itself."""

    def __init__(self, model: Any, ids: Tensor, chunk: int) -> None:
        super().__init__(model, ids.shape[1], ids.shape[0])
        self._ids, self._chunk = ids, chunk
        self._kept = self.retrieval(Config(sink=0, window=1, index="flat", retrieve=1, prefill_chunk=chunk))

    @property
    def about(self) -> str:
        return f"read by the model, all {self.num_layers} layers distinct"

    def block(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        from retrieval_attn.testing import to_device

        kept: Any = self._kept.layers[layer]
        like = torch.empty(0, dtype=self.model.dtype, device=self.model.device)
        rows = [host.read(start, stop) for host in kept.hosts]
        keys, values = zip(
            *[(to_device(k, kept.held.fmt, like), to_device(v, kept.held.fmt, like)) for k, v in rows], strict=True
        )
        return torch.stack(keys), torch.stack(values)

    def read_into(self, cache: Any) -> None:
        """See `Source.read_into`."""
        positions = torch.arange(self.tokens, device=self._ids.device)[None]
        with torch.no_grad(), using_retrieval(self.model, self._chunk):
            forward(self.model, cache, self._ids, mask=None, position_ids=positions)

    def retrieval(self, config: Config) -> RetrievalCache:
        cache, _ = read(self.model, config.replace(prefill_chunk=self._chunk), self._ids)
        finish_prefill(cache)
        return cache


class SyntheticSource(Source):
    """Synthetic keys for `distinct` layers, which the others share."""

    def __init__(
        self, model: Any, tokens: int, batch: int, *, distinct: int, train: int, level: str, seed: int, threads: int
    ) -> None:
        """level: "mid" or "hard". train: training queries per query head. Raises ConfigError for a model whose
        queries cannot be replaced or whose rotary embedding is not the plain one.
        """
        super().__init__(model, tokens, batch)
        self._theta = _plain_theta(model)
        self._distinct, self._seed, self.level = min(distinct, self.num_layers), seed, level
        self._keys: list[Tensor] = []
        self._train: list[Tensor] = []
        self._bank: list[Tensor] = []
        for layer in range(self._distinct):
            self._make(layer, train, threads)

    def _make(self, layer: int, train: int, threads: int) -> None:
        parts: list[list[Tensor]] = [[], [], []]
        for row in range(self.batch):
            heads = list(zip(*self._heads(layer, row, train, threads), strict=True))
            for own, made in zip(parts, heads, strict=True):
                own.append(torch.stack(made))
        keys, trained, bank = (torch.stack(own) for own in parts)
        self._keys.append(keys)
        self._train.append(trained.flatten(1, 2))
        self._bank.append(bank.flatten(1, 2))

    def _heads(self, layer: int, row: int, train: int, threads: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        made = synthetic_heads(
            self.tokens,
            self.kv_heads,
            head_dim=self.head_dim,
            group=self.group,
            level=self.level,
            train=train,
            decode=BANK,
            seed=1000 * (self._seed + row) + layer * self.kv_heads,
            theta=self._theta,
            threads=threads,
        )
        for head in made:
            self._positions = torch.from_numpy(head.train_positions)
            after = torch.arange(self.tokens, self.tokens + BANK)
            yield (
                torch.from_numpy(head.keys).to(self.model.dtype),
                rotate(torch.from_numpy(head.train), -self._positions, self._theta),
                rotate(torch.from_numpy(head.decode), -after, self._theta),
            )

    @property
    def about(self) -> str:
        own = f"all {self.num_layers} layers distinct"
        if self._distinct < self.num_layers:
            own = f"{self._distinct} layers' keys shared by {self.num_layers} layers (other queries)"
        return f"synthetic:{self.level}, {own}"

    @property
    def distinct(self) -> int:
        return self._distinct

    def block(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        own = layer % self._distinct
        keys = self._keys[own][:, :, start:stop].to(self.model.device)
        values = [self._values(own, number) for number in range(start // BLOCK, -(-stop // BLOCK))]
        low = start - start // BLOCK * BLOCK
        return keys, torch.cat(values, dim=2)[:, :, low : low + stop - start]

    def _values(self, layer: int, block: int) -> Tensor:
        device = self.model.device
        generator = torch.Generator(device).manual_seed(self._seed * 7919 + layer * 65537 + block)
        shape = (self.batch, self.kv_heads, BLOCK, self.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(self.model.dtype)

    def queries(self, layer: int, start: int, stop: int) -> Tensor:
        """At every token the training query of the nearest token that has one, moved there."""
        own, device = layer % self._distinct, self.model.device
        columns = torch.arange(start, stop)
        nearest = torch.searchsorted(self._positions, columns).clamp_(max=len(self._positions) - 1)
        picked = self._train[own][:, :, nearest].to(device)
        return rotate(picked, columns.to(device), self._theta).to(self.model.dtype)

    def retrieval(self, config: Config) -> RetrievalCache:
        return place(self.model, RetrievalCache(self.model, config), self, [(0, self.tokens)])

    def read_into(self, cache: Any) -> None:
        """See `Source.read_into`."""
        fill_watching(cache, self)

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """Replace what every q_proj gives by the synthetic query of the position; capturable by a graph."""
        feeder = _feeders.get(self.model)
        if feeder is None or feeder.batch != self.batch:
            feeder = _feeders[self.model] = _Feeder(self.model, self.batch, self.kv_heads * self.group * self.head_dim)
        # layers that share keys must not ask the same at once: the second would find the caches warm
        banks = [
            self._bank[layer % self._distinct].roll(7 * (layer // self._distinct), dims=2)
            for layer in range(self.num_layers)
        ]
        feeder.load(banks)
        hooks = feeder.register(self.model)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _Feeder:
    """The hooks that feed a model, and their buffers: the same for all contexts, as captured graphs hold both."""

    def __init__(self, model: Any, batch: int, width: int) -> None:
        self.batch = batch
        self._place = torch.zeros(1, dtype=torch.int64, device=model.device)
        shape = (BANK, batch, 1, width)
        self._banks = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in attentions(model)]
        self._hooks = [capturable(_replacing(bank, self._place)) for bank in self._banks]
        self._note = capturable(_noting_place(self._place))

    def load(self, banks: Sequence[Tensor]) -> None:
        """Take queries (batch, q_heads, BANK, dim) of every layer, before rotation."""
        for bank, queries in zip(self._banks, banks, strict=True):
            bank.copy_(queries.permute(2, 0, 1, 3).flatten(2)[:, :, None])

    def register(self, model: Any) -> list[RemovableHandle]:
        """Hook `model`; remove what is returned."""
        handles = [model.register_forward_pre_hook(self._note, with_kwargs=True)]
        for module, hook in zip(attentions(model), self._hooks, strict=True):
            handles.append(module.q_proj.register_forward_hook(hook))
        return handles


_feeders: weakref.WeakKeyDictionary[Any, _Feeder] = weakref.WeakKeyDictionary()


def _noting_place(place: Tensor) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        place.copy_(kwargs["position_ids"][0, :1]).remainder_(BANK)

    return hook


def _replacing(bank: Tensor, place: Tensor) -> Any:
    def hook(module: nn.Module, given: Any, out: Tensor) -> Tensor | None:
        return bank.index_select(0, place)[0] if out.shape[1] == 1 else None

    return hook


def rotate(vectors: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE in the half-split layout, as `index.synthetic.rotate`: vectors (..., m, dim) at positions (m,), float32."""
    half = vectors.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=positions.device, dtype=torch.float64) / half)
    angles = positions[:, None] * rates
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = vectors[..., :half].float(), vectors[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _plain_theta(model: Any) -> float:
    config = model.config.get_text_config(decoder=True)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    first = attentions(model)[0]
    reason = None
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        reason = f"a rotary embedding of type {rope.get('rope_type')}"
    elif not hasattr(first, "q_proj") or hasattr(first, "q_norm"):
        reason = f"{type(first).__name__} has no q_proj whose result is the query"
    if reason:
        raise ConfigError(
            f"synthetic keys need a Llama-like model with plain rotary embedding; {config.model_type} has {reason}. "
            "Give --keys read."
        )
    return float(rope.get("rope_theta", 10000.0))
