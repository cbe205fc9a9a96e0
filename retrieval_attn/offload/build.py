"""IndexBuild: indexes over one layer's new keys with their training; BudgetBuild: keys per head for retrieve="auto"."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from retrieval_attn.config import MEAN_RETRIEVE
from retrieval_attn.cpu.ahead import wait_for_builders
from retrieval_attn.cpu.budgets import allocated, measured_errors
from retrieval_attn.cpu.host_attend import attend_path
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.gpu.attention.merge import Scoring
from retrieval_attn.gpu.knn import nearest_keys
from retrieval_attn.index.base import QueryMoment
from retrieval_attn.index.threads import builder_threads, single_blas, usable_cores
from retrieval_attn.offload.codes import DeviceCoder
from retrieval_attn.offload.queries import moments
from retrieval_attn.offload.staging import CopyChunk, brought_together, staging
from retrieval_attn.offload.threads import ThreadPool

log = logging.getLogger(__name__)

CODERS = 8
"""Threads that learn how keys are coded and have the device do it, by an index of that kind; half the cores at most."""


HOST_DTYPES: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int32: np.int32,
}
"""Of training data."""


@dataclass
class _IndexJob:
    """Build the index of a path over tokens [start, stop), or extend it up to stop.

    queries, lists: to train on, on the device until `IndexBuild.fetch`. moment: of the queries, in their place for a
    kind that needs no more, as fields of QueryMoment. keys: (kv_heads, stop - start, head_dim) of
    these tokens where they still lie on the device, for a kind that has them coded there.
    """

    host: SequenceKV
    start: int
    stop: int
    extend: bool
    queries: Tensor | np.ndarray | None = None
    lists: Tensor | np.ndarray | None = None
    moment: tuple[Tensor, ...] | QueryMoment | None = None
    keys: Tensor | None = None


class IndexBuild:
    """The indexes that one layer's pass asks for. overlaps: whether the host builds while the device computes."""

    def __init__(
        self, number: int, device: torch.device, threads: int | None, overlaps: bool, stop: threading.Event
    ) -> None:
        """number: of the layer, named in log lines. threads: of builds, None = all. stop: when it is set, no other
        head is begun: CancelledError.
        """
        self._number, self._device, self._threads = number, device, threads
        self._overlaps, self._stop = overlaps, stop
        self._jobs: list[_IndexJob] = []
        self.keeps_keys = False
        """Whether keys stay on the device until the indexes are built."""

    @property
    def requested(self) -> bool:
        """Whether anything is to be built."""
        return bool(self._jobs)

    @property
    def fetches(self) -> bool:
        """Whether `fetch` has anything to bring."""
        return any(
            isinstance(part, Tensor) for job in self._jobs for part in (job.queries, job.lists, *(job.moment or ()))
        )

    def extend(self, host: SequenceKV, stop: int) -> None:
        """The index of `host` takes in the tokens up to `stop`."""
        self._jobs.append(_IndexJob(host, 0, stop, True))

    def add(
        self, host: SequenceKV, span: tuple[int, int], queries: Tensor | None, keys: Callable[[], Tensor], whole: bool
    ) -> None:
        """Tokens [span[0], span[1]) of `host` get an index.

        queries: (q_heads, m, head_dim) on the device, to train on, or None. keys: gives the path's keys (kv_heads,
        tokens, head_dim) there, which the training lists are computed from where the device is a GPU. whole: whether
        they are the tensor that is being copied.
        """
        start, stop = span
        job = _IndexJob(host, start, stop, False)
        if queries is not None:
            job.queries, job.lists = queries, self._lists(host, queries, keys, start, stop)
            if job.lists is not None and host.spec.cls.training.only_lists:
                job.queries = None  # the lists say it all
            elif host.spec.cls.training.only_moment and self._overlaps:
                job.queries, job.moment = None, moments(queries, host.num_kv_heads)
        if host.spec.keeps_device_keys and self._overlaps and whole:
            job.keys, self.keeps_keys = keys()[:, start:stop], True
        self._jobs.append(job)

    def _lists(
        self, host: SequenceKV, queries: Tensor, keys: Callable[[], Tensor], start: int, stop: int
    ) -> Tensor | None:
        kk = host.spec.list_length(stop - start)
        if not kk or not self._overlaps:
            return None
        try:
            return nearest_keys(queries, keys()[:, start:stop], kk)
        except torch.cuda.OutOfMemoryError as error:
            log.warning(
                "layer %d: no room for training lists on the device (%s): the CPU makes them", self._number, error
            )
            return None

    def fetch(self, ready: torch.cuda.Event | None) -> None:
        """Bring queries and lists to the host, once `ready` is over."""
        for job in self._jobs:
            if isinstance(job.queries, Tensor):
                job.queries = self._fetched(job.queries.float(), ready)
            if isinstance(job.lists, Tensor):
                job.lists = self._fetched(job.lists, ready)
            if job.moment is not None and not isinstance(job.moment, QueryMoment):
                product, count = (self._fetched(part, ready) for part in job.moment)
                job.moment = QueryMoment(product, count)

    def _fetched(self, tensor: Tensor, ready: torch.cuda.Event | None) -> np.ndarray:
        if self._device.type != "cuda":
            return tensor.cpu().numpy()
        array = np.empty(tensor.shape, HOST_DTYPES[tensor.dtype])
        flat, out = tensor.reshape(-1), array.reshape(-1)
        ring = staging(self._device)
        step = ring.size // tensor.element_size()

        def pieces() -> Iterator[CopyChunk]:
            for start in range(0, len(flat), step):
                yield [flat[start : start + step]], functools.partial(np.copyto, out[start : start + step])

        ring.bring(pieces(), ready)
        return array

    def run(self, ready: torch.cuda.Event | None) -> None:
        """Build or extend, path after path. ready: what keys on the device wait for. `fetch` came before."""
        while self._jobs:
            job = self._jobs.pop(0)
            wait_for_builders(job.host.spec, extends=job.extend)
            if self._stop.is_set():
                raise CancelledError
            if job.extend:
                job.host.extend_index(job.stop)
                continue
            assert not isinstance(job.queries, Tensor) and not isinstance(job.lists, Tensor), "fetch comes first"
            keys, job.keys = job.keys, None  # the device's memory is free again once they are coded
            spec = job.host.spec
            stays = spec.keeps_codes(job.host.head_dim)  # codes are all there is to build
            coded = stays or (spec.keeps_device_keys and keys is not None)
            on_host = spec.host_reads.codes
            coder = DeviceCoder(self._device, job.host.num_kv_heads, on_host=on_host) if coded else None
            each = None
            if self._overlaps:
                each = functools.partial(self._each, _coders() if stays else _heads(self._threads))
            lent = contextlib.nullcontext() if coder is None or keys is None else coder.lent(keys, ready)
            with lent, contextlib.nullcontext() if each is None else single_blas():
                assert not isinstance(job.moment, tuple) or isinstance(job.moment, QueryMoment), "fetch comes first"
                sample = job.queries if job.moment is None else job.moment
                job.host.build_index(job.start, job.stop, sample, job.lists, each, coder)

    def _each(self, pool: ThreadPool, build: Callable[[int], Any], heads: Iterable[int]) -> list[Any]:
        """build(head) for all heads by the pool, each with the threads that are left to it, within `single_blas`."""

        def one(head: int) -> Any:
            if self._stop.is_set():
                raise CancelledError
            with builder_threads(max(1, pool.most // max(1, pool.busy)), pool.most):
                return build(head)

        return pool.map(one, heads)


def event_now(device: torch.device) -> torch.cuda.Event | None:
    """An event at this point of the device's current stream; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@functools.cache
def _coders() -> ThreadPool:
    """Few: what they do is in part Python, and each thread more holds the one up that drives the device."""
    return ThreadPool(max(2, min(CODERS, len(usable_cores()) // 2)), "retrieval_attn-code")


@functools.cache
def _heads(threads: int | None) -> ThreadPool:
    """Builders of heads: one core is left to the thread that drives the device."""
    most = min(vars(numba.config)["NUMBA_NUM_THREADS"], len(usable_cores()))  # of several ranks on a machine: its share
    return ThreadPool(max(1, (most if threads is None else threads) - 1), "retrieval_attn-index")


class BudgetBuild:
    """Budgets of keys per head of one layer's prefill: `add` the sequences, then `run`."""

    def __init__(self) -> None:
        self._jobs: list[tuple[SequenceKV, tuple[int, int], list[Tensor], Scoring]] = []

    def add(self, host: SequenceKV, span: tuple[int, int], sample: list[Tensor], scoring: Scoring) -> None:
        """Queue `host`, whose tokens span[0] .. span[1] are retrieved, for budgets by a sample.

        sample: queries and their attention to sinks and window, out and lse, float32 on the device.
        """
        self._jobs.append((host, span, sample, scoring))

    def run(self) -> None:
        """Measure errors and choose budgets; indexes exist. Raises ConfigError for a kind without compiled search."""
        while self._jobs:
            host, (start, stop), taken, (scale, softcap) = self._jobs.pop(0)
            queries, out, lse = (np.ascontiguousarray(part.numpy()) for part in brought_together(taken))
            attend = functools.partial(attend_path, host, queries, start, stop, scale=scale, softcap=softcap)
            budgets = allocated(measured_errors((out, lse), attend), MEAN_RETRIEVE)
            attend_path(host, queries[:, :1], start, stop, budgets, scale=scale, softcap=softcap)  # raises now if so
            host.budgets = budgets
