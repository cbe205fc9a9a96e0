"""Metrics in Prometheus' form, with the names that vLLM's have behind the colon where they mean the same."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from retrieval_attn.engine.counts import TierTokens

__all__ = ["Metrics"]

PREFIX = "retrieval_attn:"
FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
TOKEN_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
SHARED = {
    "nodes": "Texts that the tree of prefixes knows",
    "in_memory": "Of these, in memory",
    "nbytes": "Bytes that the tree of prefixes holds",
    "host_nbytes": "Of these, in host memory",
    "device_nbytes": "Of these, in the memory of GPUs",
    "page_nbytes": "Of these, in the engine's pages for exact prefixes",
    "evicted": "Texts that the tree gave up since the start",
    "evicted_bytes": "Bytes that the tree gave up since the start",
    "tokens_asked": "Tokens that were looked up in the tree since the start",
    "tokens_hit": "Of these, found",
}
ENGINE = {
    "steps": "Steps of the engine, each a token of every row",
    "step_seconds": "Seconds of the engine's steps",
    "host_seconds": "Of these, the host searched and attended",
    "waiting_seconds": "Of these, no model ran, or it may have waited for the host",
    "spills": "Rows whose full window moved tokens to the host, in a step each",
}
TIERS = {
    "hits": "Requests that found a beginning of their prompt, by where",
    "hit_tokens": "Tokens of prompts that were found, by where",
}


class Following:
    """A counter that follows one of the engine's, which begins anew when the engine's process does."""

    def __init__(self, counter: Counter) -> None:
        self._counter, self._last = counter, 0.0

    def follow(self, value: float) -> None:
        """The engine's shows this now."""
        self._counter.inc(value - self._last if value >= self._last else value)
        self._last = value


class Metrics:
    """Of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._http = self._counter("http_requests", "HTTP requests", "method", "path", "status")
        self._success = self._counter("request_success", "Answers that ended by themselves", "finished_reason")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts, with those of saved contexts")
        self._cached = self._counter("prompt_tokens_cached", "Of these, not read for their request")
        self._generated = self._counter("generation_tokens", "Tokens of answers")
        self._disconnected = self._counter("request_disconnected", "Requests whose client went before the end")
        self._first = self._histogram("time_to_first_token_seconds", "To the first token", FIRST_TOKEN_SECONDS)
        self._between = self._histogram("time_per_output_token_seconds", "Mean, between tokens", TOKEN_SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "To the end of an answer", REQUEST_SECONDS)
        self._running = self._gauge("num_requests_running", "Rows of the engine's steps now")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait in the engine now")
        self._first_waiting = self._gauge("num_requests_without_token", "Requests that wait for their first token now")
        self._filled = self._gauge("slots_filled_ratio", "Share of rows that were filled in the steps so far")
        self._up = self._gauge("engine_up", "1 while the engine answers")
        self._engine = {name: Following(self._counter(f"engine_{name}", text)) for name, text in ENGINE.items()}
        self._damaged = Following(self._counter("damaged_blocks", "Blocks of saved contexts that were found damaged"))
        tiers = {name: self._counter(f"tier_{name}", text, "tier") for name, text in TIERS.items()}
        self._tiers = {
            (name, tier): Following(counter.labels(tier))
            for name, counter in tiers.items()
            for tier in TierTokens._fields
        }
        self._shared = {name: self._gauge(f"prefix_{name}", text) for name, text in SHARED.items()}

    def http(self, method: str, path: str, status: int) -> None:
        """A request is over. path: the route's, not the request's."""
        self._http.labels(method, path, str(status)).inc()

    def answered(self, tokens: tuple[int, int, int], first_seconds: float | None, seconds: float) -> None:
        """A request has its answer. tokens: of the prompt, cached of these, generated; seconds: since it came."""
        prompt, cached, generated = tokens
        self._prompt.inc(prompt)
        self._cached.inc(cached)
        self._generated.inc(generated)
        self._whole.observe(seconds)
        if first_seconds is not None:
            self._first.observe(first_seconds)
            if generated > 1:
                self._between.observe((seconds - first_seconds) / (generated - 1))

    def finished(self, reason: str) -> None:
        """One choice has ended by itself: "stop" or "length"."""
        self._success.labels(reason).inc()

    def disconnected(self) -> None:
        """A client went before its answer was over."""
        self._disconnected.inc()

    def text(self, stats: dict[str, Any] | None, waiting: int) -> bytes:
        """All of it. stats: the engine's, or None for one that is lost. waiting: requests without a token."""
        self._up.set(stats is not None)
        self._first_waiting.set(waiting)
        if stats is not None:
            self._running.set(stats["rows"])
            self._waiting.set(stats["waiting"])
            self._filled.set(stats["filled"])
            self._damaged.follow(stats["damaged_blocks"])
            for name, counter in self._engine.items():
                counter.follow(stats[name])
            for (name, tier), counter in self._tiers.items():
                counter.follow(stats[name][tier])
            for name, gauge in self._shared.items():
                gauge.set(stats["shared"][name])
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)
