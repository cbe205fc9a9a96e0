"""Published methods that choose tokens by a rule of their own, beside this package: SnapKV and InfLLM.

They run as in the evaluation (`baselines/`), keys on the device and the model's forward in Python, with their papers'
parameters. The short context that answers are checked on is smaller than their budgets: there they are full attention.
"""

from __future__ import annotations

import torch

from retrieval_attn.engine.attention import using_retrieval
from retrieval_attn.eval.baselines.cache import ContextCache
from retrieval_attn.eval.baselines.method import policies_of
from retrieval_attn.eval.baselines.options import InfLLM, Options, SnapKV
from retrieval_attn.eval.bench.baselines import OwnLoop
from retrieval_attn.eval.bench.method import Decoded, OnToken
from retrieval_attn.eval.bench.source import Source

OPTIONS: dict[str, type[Options]] = {"snapkv": SnapKV, "infllm": InfLLM}


class ByPolicy(OwnLoop):
    """For one sequence."""

    def prepare(self, source: Source, room: int) -> None:
        self._hold(source)
        name = self.spec.name
        cache = ContextCache(self.model, {name: policies_of(OPTIONS[name](), self.model)}, self.config)
        source.read_into(cache)
        cache.context_tokens = source.tokens
        cache.act(name)
        cache.start()
        self._cache = cache

    def decode(
        self, steps: int, on_token: OnToken | None = None, *, keep: bool = False, seconds: float = 1e9
    ) -> Decoded:
        with torch.no_grad(), using_retrieval(self.model, self.config.prefill_chunk):
            return super().decode(steps, on_token, keep=keep, seconds=seconds)

    def device_bytes_touched(self, source: Source) -> int:
        """As the policies counted them."""
        meters = self._cache.meters()
        read = sum(meter.read / max(1, meter.queries) for meter in meters) / len(meters)
        return int(read * source.token_bytes)
