"""A cache whose layers keep all tokens on the device and attend as one of several methods says.

While a context is read, attention is full and every attached policy watches.  `choose` then makes the layers answer
as one policy does, and `rewind` goes back to the context, so that one reading serves several methods and questions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from retrieval_attn import RetrievalCache
from retrieval_attn.config import Config
from retrieval_attn.errors import UnsupportedModelError
from retrieval_attn.testing import Batch, CacheLayer, MaskSpec, Partial, RetrievalLayer
from retrieval_attn_eval.baselines.policy import Meter, Policy, attend_all
from retrieval_attn_eval.baselines.tokens import TokenBuffer

PolicyFactory = Callable[[int, int], Policy]
"""(layer, layers) -> the policy of that layer."""

_ROOM = 1024


class ContextLayer(CacheLayer):
    """One layer.  watching: policies that see the context being read.  acting: the one that answers, or None."""

    def __init__(self, config: Config, watching: dict[str, Policy], batch: Batch) -> None:
        super().__init__(config, batch)
        self.tokens = TokenBuffer()
        self.watching = watching
        self.acting: Policy | None = None
        self.started = False
        for policy in watching.values():
            policy.tokens = self.tokens

    def reset(self) -> None:
        raise UnsupportedModelError("A baseline's cache cannot be reset; make a new one.")

    @property
    def window(self) -> None:
        """All tokens are in `tokens`."""
        return None

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scale: float, softcap: float | None
    ) -> Partial:
        valid = self.batch.note_padding(spec.padding, self.columns, key.shape[2])
        if key.shape[0] != 1 or valid is not None:
            raise UnsupportedModelError(f"Baselines run one unpadded sequence, got a batch of {key.shape[0]}.")
        if softcap is not None:
            raise UnsupportedModelError(
                "Baselines are defined for plain softmax attention; this model caps its scores."
            )
        position = self.columns
        self._note_stored(key.shape[2])
        module = None if self._owner is None else self._owner()
        assert module is not None
        for policy in (*self.watching.values(), *([self.acting] if self.acting else [])):
            policy.bind(module)
        if self.acting is not None and self.started:
            return _through(self.acting, query, key, value, position, scale)
        self.tokens.append(key, value, max(_ROOM, self._announced or 0))
        watching = list(self.watching.values()) if self.acting is None else [self.acting]
        if watching and watching[0].options.reads:
            return watching[0].attend(query, position, 0, scale)
        part = attend_all(query, self.tokens, scale)
        for policy in watching:
            policy.observe(query, position, scale)
        return part

    def rewind(self, columns: int) -> None:
        """Back to the context of `columns` tokens, nobody acting."""
        self.tokens.truncate(columns)
        self.acting, self.started = None, False
        self._pending = None


def _through(policy: Policy, query: Tensor, key: Tensor, value: Tensor, position: int, scale: float) -> Partial:
    """New tokens through a policy, one after the other if it takes them so."""
    count = query.shape[2]
    if not policy.one_by_one:
        policy.append(key, value)
        return policy.attend(query, position, 0, scale)
    parts = []
    for row in range(count):
        one = slice(row, row + 1)
        policy.append(key[:, :, one], value[:, :, one])
        parts.append(policy.attend(query[:, :, one], position + row, row, scale))
    return Partial(torch.cat([part.out for part in parts], dim=2), torch.cat([part.lse for part in parts], dim=2))


class ContextCache(RetrievalCache):
    """past_key_values of one context.  Its layers are ContextLayers; everything stays on the device."""

    def __init__(self, model: Any, factories: dict[str, PolicyFactory], config: Config) -> None:
        """factories: the methods that will be asked, by a key of the caller's.  Raises UnsupportedModelError."""
        super().__init__(model, config)
        require_plain(model, self.layers)
        count = len(self.layers)
        self.layers = [
            ContextLayer(config, {name: make(index, count) for name, make in factories.items()}, self.batch)
            for index in range(count)
        ]
        self.own[-1].commits = True
        self.context_tokens = 0

    @property
    def own(self) -> list[ContextLayer]:
        """The layers."""
        return [layer for layer in self.layers if isinstance(layer, ContextLayer)]

    @property
    def device_nbytes(self) -> int:
        """Bytes of device memory held."""
        return sum(layer.tokens.nbytes for layer in self.own)

    def fork(self) -> Self:
        raise UnsupportedModelError("A baseline's cache is rewound, not forked.")

    def act(self, name: str) -> None:
        """From now on only the policies called `name` watch, on copies that `rewind` throws away."""
        for layer in self.own:
            layer.acting = layer.watching[name].fork()

    def start(self) -> float:
        """The context of the acting policies is complete; seconds they took to prepare."""
        began = time.perf_counter()
        for layer in self.own:
            if layer.acting is not None:
                layer.acting.meter = Meter()  # what is measured is answering, not reading
                layer.acting.start()
            layer.started = True
        if layer.tokens.key.is_cuda:
            torch.cuda.synchronize(layer.tokens.key.device)
        return time.perf_counter() - began

    def rewind(self) -> None:
        """Back to the context."""
        for layer in self.own:
            layer.rewind(self.context_tokens)
        self.batch.crop(self.context_tokens)

    def meters(self) -> list[Meter]:
        """What the acting policy of each layer has measured since `start`."""
        return [layer.acting.meter for layer in self.own if layer.acting is not None]


def require_plain(model: Any, layers: list[Any]) -> None:
    """Raise UnsupportedModelError unless every layer is plain full attention."""
    config = model.config.get_text_config(decoder=True)
    odd = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, RetrievalLayer)})
    if odd:
        raise UnsupportedModelError(
            f"{config.model_type} has layers that are not full attention ({', '.join(odd)}); the published baselines "
            "are defined for full-attention layers only. Use the methods full, flat, ivf, hnsw or retrieval."
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModelError(
            f"{config.model_type} caps its attention scores (attn_logit_softcapping); the published baselines are "
            "defined for plain softmax. Use the methods full, flat, ivf, hnsw or retrieval."
        )


def attention_modules(model: Any) -> list[nn.Module]:
    """The attention module of every layer, by layer index."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and not isinstance(index, bool) and type(module).__name__.endswith("Attention"):
            found[index] = module
    return [found[index] for index in sorted(found)]
