"""Limits of what all jobs together hold, and of the time between tokens. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import isfinite

from retrieval_attn.engine.request_needs import RequestNeeds
from retrieval_attn.errors import AdmissionError, ConfigError

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """What the scheduler shares out. Raises ConfigError for values out of range.

    rows: most rows of a step. host_bytes: for keys and values of all jobs. token_bytes: of one token, all layers.
    inter_token_seconds: from one token to the next; reads take what decoding leaves of it. waiting: most jobs that
    wait. promote_seconds: age from which a batch job counts as interactive.

    chunk_tokens, layers: a chunk of reading is a chunk in one layer, or the layer's end; a prompt of at most one chunk
    is short, and overtakes. ahead: jobs that are read although no slot is free, so that the next one to get a slot is
    ready: at most rows + ahead jobs are admitted and not parked. quantum_tokens: what an owner may be ahead of others
    before these come first. prefix_cache_device_bytes: of GPUs, for prefixes in the tree; None: no bound, as where the
    model runs on a CPU, and all of them counts as the host's.
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
        """With this bound of what the tree has on GPUs; None: as they are. Raises ConfigError without a GPU."""
        if device_bytes is None:
            return self
        if self.prefix_cache_device_bytes is None:
            raise ConfigError(
                f"{device_bytes:,} bytes of a GPU's memory were given for shared prefixes, but the model runs on none; "
                "bound the host's alone, or choose device cuda"
            )
        return replace(self, prefix_cache_device_bytes=device_bytes)

    def job_bytes(self, job: RequestNeeds) -> int:
        """Host bytes that a job reserves: for all tokens that it may ever add."""
        return job.new_tokens * self.token_bytes

    def is_long(self, job: RequestNeeds) -> bool:
        """Whether reading it takes more than one chunk."""
        return job.unread_tokens > self.chunk_tokens

    def chunks(self, job: RequestNeeds) -> int:
        """Cells of its reading, where chunks keep their size; 0 where nothing is to be read."""
        return self.layer_chunks(job.unread_tokens) * self.layers

    def layer_chunks(self, tokens: int) -> int:
        """Of so many unread tokens in one layer: its chunks, and what ends the layer's pass behind several."""
        chunks = -(-tokens // self.chunk_tokens)
        return chunks + (chunks > 1)

    def refuse_too_large(self, job: RequestNeeds) -> None:
        """Raise AdmissionError for a job that would not fit even if it were the only one."""
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
