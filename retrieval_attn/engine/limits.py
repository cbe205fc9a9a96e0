"""Limits of memory, batch size and latency of an engine. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import isfinite

from retrieval_attn.engine.request_needs import RequestNeeds
from retrieval_attn.errors import AdmissionError, ConfigError

__all__ = ["KEEP_SESSION_SECONDS", "Limits"]

KEEP_SESSION_SECONDS = 1800.0
"""Default time of a session's pins: longer than most pauses of a user between two turns."""


@dataclass(frozen=True)
class Limits:
    """Limits of an engine. Raises ConfigError for values out of range.

    Attributes:
        rows: largest batch of a step.
        host_bytes: host memory for the KV cache of all requests.
        token_bytes: bytes of one token in all layers.
        inter_token_seconds: target time between tokens; prefill gets what decoding leaves of it.
        waiting: largest number of waiting requests.
        promote_seconds: age from which a batch request counts as interactive.
        chunk_tokens: tokens of a prefill chunk; a prompt of one chunk is short and may overtake.
        layers: layers of the model; a chunk is computed in one layer at a time.
        ahead: requests that are prefilled without a free slot, so that at most rows + ahead are admitted and not
            preempted.
        quantum_tokens: tokens that an owner may be ahead of others before these are served first.
        prefix_cache_device_bytes: GPU memory of the prefix cache. None: no limit, as for a model on a CPU.
    """

    rows: int
    host_bytes: int
    token_bytes: int
    inter_token_seconds: float
    waiting: int = 1024
    promote_seconds: float = 60.0
    chunk_tokens: int = 2048
    layers: int = 1
    ahead: int = 2
    quantum_tokens: int = 1024
    prefix_cache_device_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "prefix_cache_device_bytes" and value is None:
                continue
            kind, least = (float, 0.0) if name.endswith("_seconds") else (int, 0 if name in _MAY_BE_ZERO else 1)
            right = isinstance(value, int | float) if kind is float else isinstance(value, int)
            if isinstance(value, bool) or not right or not isfinite(value) or value < least:
                raise ConfigError(f"{name} must be a finite {kind.__name__} >= {least}, got {value!r}.")

    def sharing(self, device_bytes: int | None) -> Limits:
        """Return the limits with this GPU memory for the prefix cache; None: unchanged.

        Raises ConfigError if the model runs on no GPU.
        """
        if device_bytes is None:
            return self
        if self.prefix_cache_device_bytes is None:
            raise ConfigError(
                f"{device_bytes:,} bytes of a GPU's memory were given for shared prefixes, but the model runs on none; "
                "bound the host's alone, or choose device cuda"
            )
        return replace(self, prefix_cache_device_bytes=device_bytes)

    def job_bytes(self, job: RequestNeeds) -> int:
        """Return the host bytes that a request reserves, for all tokens that it may add."""
        return job.new_tokens * self.token_bytes

    def is_long(self, job: RequestNeeds) -> bool:
        """Return whether the prompt takes more than one chunk."""
        return job.unread_tokens > self.chunk_tokens

    def chunks(self, job: RequestNeeds) -> int:
        """Return the chunks of a prefill in all layers if none is halved; 0 without tokens to prefill."""
        return self.layer_chunks(job.unread_tokens) * self.layers

    def layer_chunks(self, tokens: int) -> int:
        """Return the chunks of `tokens` tokens in one layer, plus one for the layer's end after several."""
        chunks = -(-tokens // self.chunk_tokens)
        return chunks + (chunks > 1)

    def refuse_too_large(self, job: RequestNeeds) -> None:
        """Raise AdmissionError for a request that does not fit even alone."""
        need = self.job_bytes(job)
        if need > self.host_bytes:
            raise AdmissionError(
                f"Job {job.id!r} needs ({job.prompt_tokens:,} prompt - {job.cached_tokens:,} cached + "
                f"{job.max_tokens:,} generated) = {job.new_tokens:,} tokens x "
                f"{self.token_bytes:,} bytes = {need:,} bytes of host memory; all jobs together may have "
                f"{self.host_bytes:,}. It fits with {self.host_bytes // self.token_bytes:,} "
                f"tokens: shorten the prompt, lower max_tokens, or give the engine more host memory.",
                limit=self.host_bytes // self.token_bytes,
                tokens=job.new_tokens,
            )


_MAY_BE_ZERO = ("ahead", "waiting", "host_bytes", "prefix_cache_device_bytes")
