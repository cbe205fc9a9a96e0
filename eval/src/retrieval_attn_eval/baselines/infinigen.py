"""InfiniGen: guess which keys a layer needs from the input of the layer before, with a few skewed columns.

Follows "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache Management",
section 4.  Like the paper: queries and keys are skewed by an orthogonal matrix per head from a singular value
decomposition of queries; the `partial` columns with the largest absolute query sums are kept; while decoding, the
attention input of the layer before times this layer's query weight gives speculated queries; keys whose speculated
score lies within alpha of the head's best count, every head fetches the mean count, its own best ones, at most
`most` of the cache; attention over the fetched keys is exact.
Unlike the paper: (1) rotary models rotate between projection and score, so the whole query is projected and rotated
before columns are taken, as the paper's own Llama script does; the accuracy is speculation's, the saved work is not.
(2) The matrix comes from this context's queries instead of a sample text, and heads that share keys share it.
(3) Columns are ranked over at most SAMPLE queries per read chunk.  (4) The new token is always attended.
(5) Nothing is offloaded or prefetched, and the cache keeps all tokens (no eviction from its pool).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from retrieval_attn.errors import UnsupportedModelError
from retrieval_attn.testing import Partial
from retrieval_attn_eval.baselines.policy import Policy, attend_picked, distinct
from retrieval_attn_eval.baselines.tokens import TokenBuffer

SAMPLE = 256


class Speculation(Policy):
    """Speculates from what `LayerInputs` noted of the layer before."""

    def __init__(self, options: Any, layer: int, layers: int, inputs: LayerInputs) -> None:
        super().__init__(options, layer, layers)
        self._inputs = inputs
        self._module: Any = None
        self._gram = torch.zeros(())  # (q_heads, head_dim, head_dim) float32, sum of q q^T; replaced, never changed
        self._sample: tuple[Tensor, ...] = ()  # (q_heads, some, head_dim) each

    def bind(self, module: nn.Module) -> None:
        self._module = module

    def observe(self, query: Tensor, start: int, scale: float) -> None:
        rows = query[0].float()
        gram = rows.transpose(1, 2) @ rows
        self._gram = self._gram + gram
        step = -(-rows.shape[1] // SAMPLE)
        self._sample = (*self._sample, query[0, :, ::step].clone())

    def start(self) -> None:
        key = self.tokens.key
        kv_heads, dim = key.shape[1], key.shape[3]
        # right singular vectors of the queries, largest first, as eigenvectors of their Gram matrix
        gram = self._gram.reshape(kv_heads, -1, dim, dim).sum(dim=1)
        self.skew = torch.linalg.eigh(gram).eigenvectors.flip(-1)  # (kv_heads, head_dim, head_dim)
        queries = torch.cat(self._sample, dim=1).float().reshape(kv_heads, -1, dim)
        weight = (queries @ self.skew).abs().sum(dim=1)
        kept = max(1, int(dim * self.options.partial))
        self.columns = weight.topk(kept, dim=1).indices  # (kv_heads, kept)
        at = self.columns[:, None].expand(-1, dim, -1)
        self._basis = self.skew.gather(2, at)  # (kv_heads, head_dim, kept)
        self._partial = TokenBuffer()
        self._project(key)

    def append(self, key: Tensor, value: Tensor) -> None:
        super().append(key, value)
        self._project(key)

    def _project(self, key: Tensor) -> None:
        columns = (key[0].float() @ self._basis)[None]
        self._partial.append(columns, columns[..., :0])

    def attend(self, query: Tensor, position: int, row: int, scale: float) -> Partial:
        ids = self.choose(self.speculated_query(query, row), scale)
        self.meter.add(1, ids.shape[1], distinct(ids, self.tokens.key.shape[1], self.tokens.length))
        return attend_picked(query, self.tokens, ids, scale)

    def speculated_query(self, query: Tensor, row: int) -> Tensor:
        """This layer's queries if its input were that of the layer before: (q_heads, head_dim) float32."""
        hidden, rotary = self._inputs.of(self.layer - 1)
        module = self._module
        heads, dim = query.shape[1], query.shape[3]
        plain = module.q_proj(hidden[:, row : row + 1]).reshape(1, 1, heads, dim)
        norm = getattr(module, "q_norm", None)
        plain = (plain if norm is None else norm(plain)).transpose(1, 2)
        cos, sin = (table[:, row : row + 1] for table in rotary)
        rotated: Tensor = _rotate(module)(plain, plain, cos, sin)[0]
        return rotated[0, :, 0].float()

    def choose(self, guess: Tensor, scale: float) -> Tensor:
        """Tokens each query head fetches for guess (q_heads, head_dim), the newest included: (q_heads, n)."""
        kv_heads, dim, _ = self._basis.shape
        columns = guess.reshape(kv_heads, -1, dim) @ self._basis
        scores = (columns @ self._partial.key[0].transpose(1, 2)).reshape(len(guess), -1) * scale
        newest = scores.shape[1] - 1
        older = scores[:, :newest]
        if self.options.tokens is not None:
            count = min(self.options.tokens - 1, newest)
        else:
            near = older > older.amax(dim=1, keepdim=True) - self.options.alpha
            count = min(int(near.sum(dim=1).float().mean()), int(newest * self.options.most))
        best = older.topk(count, dim=1).indices
        return torch.cat([best, best.new_full((len(best), 1), newest)], dim=1)


class LayerInputs:
    """What entered each attention module in the current forward, noted by hooks while they are installed."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._seen: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> LayerInputs:
        for index, module in enumerate(self._modules):
            self._handles.append(module.register_forward_pre_hook(self._note(index), with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()

    def _note(self, index: int) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            rotary = kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[1]
            self._seen[index] = hidden, rotary

        return note

    def of(self, layer: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attention input (1, new, hidden) and rotary tables of a layer in this forward."""
        return self._seen[layer]


def _rotate(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__].apply_rotary_pos_emb


def require_projection(modules: list[nn.Module]) -> None:
    """Raise UnsupportedModelError if queries cannot be computed from another layer's input."""
    for module in modules:
        missing = [name for name in ("q_proj",) if not hasattr(module, name)]
        if not hasattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb"):
            missing.append("apply_rotary_pos_emb beside it")
        if missing:
            raise UnsupportedModelError(
                f"infinigen needs a query projection of its own and a rotary embedding to speculate queries; "
                f"{type(module).__name__} has no {', '.join(missing)}. Use another method for this model."
            )
