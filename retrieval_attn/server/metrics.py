"""Prometheus metrics; a metric with vLLM's meaning has vLLM's name after the colon."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from retrieval_attn.engine.counts import TierTokens

PREFIX = "retrieval_attn:"
FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
TOKEN_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
PREFIX_CACHE = {
    "prefix_entries_resident": ("prefix_cache_entries", "Entries of the prefix cache"),
    "nbytes": ("prefix_cache_bytes", "Bytes of the prefix cache"),
    "host_nbytes": ("prefix_cache_host_bytes", "Bytes of the prefix cache in host memory"),
    "device_nbytes": ("prefix_cache_device_bytes", "Bytes of the prefix cache in GPU memory"),
    "page_nbytes": ("prefix_cache_page_bytes", "Bytes of the prefix cache in KV pages of paged prefixes"),
}
"""Gauges: name and help by the key of the engine's statistics."""
PREFIX_CACHE_EVENTS = {
    "evicted": ("prefix_cache_evictions", "Prefix-cache entries evicted"),
    "evicted_bytes": ("prefix_cache_evicted_bytes", "Bytes of prefix-cache entries evicted"),
    "offloaded": ("prefix_cache_offloads", "Prefix-cache entries moved from GPU to host memory"),
    "offloaded_bytes": ("prefix_cache_offloaded_bytes", "Bytes of GPU memory freed by moving prefix-cache entries"),
    "prefix_tokens_queried": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "tokens_hit": ("prefix_cache_hits", "Prompt tokens found in the prefix cache"),
}
"""Counters, in the same form."""
GAUGES = {
    "rows": ("num_requests_running", "Sequences in the running batch"),
    "waiting": ("num_requests_waiting", "Requests waiting in the engine"),
    "waiting_gpu_memory": (
        "num_requests_waiting_gpu_memory", "Admitted requests that wait for GPU memory of other requests",
    ),
    "slot_utilization": ("slot_utilization", "Share of batch slots in use, mean over the decode steps"),
    "saves_running": ("context_saves_running", "Contexts whose files are not durable yet"),
    "disk_nbytes": ("prefix_cache_disk_bytes", "Bytes of prefix-cache entries on the disk"),
}  # fmt: skip
ENGINE = {
    "steps": ("engine_steps", "Decode steps; each generates a token of every running sequence, or several"),
    "step_seconds": ("engine_step_seconds", "Seconds of decode steps"),
    "host_seconds": ("engine_host_seconds", "Seconds of decode steps in which the host searched or attended"),
    "host_stall_seconds": (
        "host_stall_seconds",
        "Upper bound of the seconds of decode steps in which the device was idle or stalled on the host",
    ),
    "drafted_tokens": ("spec_decode_num_draft_tokens", "Draft tokens that decode steps verified"),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "Draft tokens that were the sampled ones"),
    "content_hits": ("saved_context_hits", "Requests that continue a saved context without naming it"),
    "content_hit_tokens": ("saved_context_hit_tokens", "Prompt tokens of saved contexts that were not named"),
    "disk_saves": ("prefix_cache_disk_saves", "Prefix-cache entries written to the disk"),
    "disk_saved_bytes": ("prefix_cache_disk_saved_bytes", "Bytes of prefix-cache entries written to the disk"),
    "disk_evictions": ("prefix_cache_disk_evictions", "Evicted prefix-cache entries that the disk had"),
    "disk_removals": ("prefix_cache_disk_removals", "Prefix-cache entries removed from the disk"),
    "disk_loads": ("prefix_cache_disk_loads", "Prefix-cache entries opened from the disk"),
    "disk_loaded_bytes": ("prefix_cache_disk_loaded_bytes", "Bytes of prefix-cache entries opened from the disk"),
    "damaged_blocks": ("damaged_blocks", "Blocks of saved contexts with a wrong checksum"),
    "saves_failed": ("context_save_failures", "Failed writes of saved contexts"),
    "window_evictions": ("window_evictions", "Evictions of a full window's oldest block to the host"),
}
TIERS = {
    "hits": ("tier_hits", "Requests with a cached prefix, by tier"),
    "hit_tokens": ("tier_hit_tokens", "Prompt tokens with cached KV, by tier"),
}


class Following:
    """A counter set from the engine's count, which restarts from 0 with the engine's process."""

    def __init__(self, counter: Counter) -> None:
        self._counter, self._last = counter, 0.0

    def follow(self, value: float) -> None:
        """Add the difference to the engine's last count."""
        self._counter.inc(value - self._last if value >= self._last else value)
        self._last = value


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._http = self._counter("http_requests", "HTTP requests", "method", "path", "status")
        self._success = self._counter(
            "request_success",
            "Choices that finished with a stop token, a stop string or at their length",
            "finished_reason",
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens, with the tokens of saved contexts")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens whose KV was cached")
        self._generated = self._counter("generation_tokens", "Generated tokens")
        self._disconnected = self._counter("request_disconnected", "Requests whose client disconnected before the end")
        self._first = self._histogram("time_to_first_token_seconds", "Seconds to the first token", FIRST_TOKEN_SECONDS)
        self._between = self._histogram("time_per_output_token_seconds", "Mean seconds per later token", TOKEN_SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "Seconds to the end of a request", REQUEST_SECONDS)
        self._first_waiting = self._gauge("num_requests_without_token", "Requests without their first token")
        self._up = self._gauge("engine_up", "1 while the engine answers")
        self._gauges = {key: self._gauge(name, text) for key, (name, text) in GAUGES.items()}
        self._engine = {key: Following(self._counter(name, text)) for key, (name, text) in ENGINE.items()}
        tiers = {key: self._counter(name, text, "tier") for key, (name, text) in TIERS.items()}
        self._tiers = {
            (name, tier): Following(counter.labels(tier))
            for name, counter in tiers.items()
            for tier in TierTokens._fields
        }
        self._cache = {key: self._gauge(name, text) for key, (name, text) in PREFIX_CACHE.items()}
        self._cache_events = {
            key: Following(self._counter(name, text)) for key, (name, text) in PREFIX_CACHE_EVENTS.items()
        }

    def http(self, method: str, path: str, status: int) -> None:
        """Count a finished HTTP request. path: the route's, not the request's."""
        self._http.labels(method, path, str(status)).inc()

    def answered(
        self, first_seconds: float | None, seconds: float, *, prompt_tokens: int, cached_tokens: int,
        generated_tokens: int,
    ) -> None:  # fmt: skip
        """Count an answer. first_seconds, seconds: from the request's arrival to the first token and to the end."""
        self._prompt.inc(prompt_tokens)
        self._cached.inc(cached_tokens)
        self._generated.inc(generated_tokens)
        self._whole.observe(seconds)
        if first_seconds is not None:
            self._first.observe(first_seconds)
            if generated_tokens > 1:
                self._between.observe((seconds - first_seconds) / (generated_tokens - 1))

    def finished(self, reason: str) -> None:
        """Count a finished choice. reason: "stop" or "length"."""
        self._success.labels(reason).inc()

    def disconnected(self) -> None:
        """Count a request whose client disconnected."""
        self._disconnected.inc()

    def text(self, stats: dict[str, Any] | None, waiting: int) -> bytes:
        """Return all metrics as text. stats: the engine's, None if it is down. waiting: requests without a token."""
        self._up.set(stats is not None)
        self._first_waiting.set(waiting)
        if stats is not None:
            for name, gauge in self._gauges.items():
                gauge.set(stats[name])
            for name, counter in self._engine.items():
                counter.follow(stats[name])
            for (name, tier), counter in self._tiers.items():
                counter.follow(stats[name][tier])
            for name, gauge in self._cache.items():
                gauge.set(stats["shared"][name])
            for name, counter in self._cache_events.items():
                counter.follow(stats["shared"][name])
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)
