"""What the host compiles before its first token, as jobs for other processes (`compile/jobs.py`), and loading it here.

Each function runs the real kernels on a few numbers: types and memory layouts are then those of real keys.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict

import numpy as np

from retrieval_attn.compile.jobs import CompileJob, wait_until_compiled
from retrieval_attn.cpu.cluster_sums import prepare_sums
from retrieval_attn.cpu.host_attend import attend_path
from retrieval_attn.cpu.pool import default_pool
from retrieval_attn.cpu.serve import compile_server
from retrieval_attn.cpu.step.plan import LayerStep
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.index.formats import Format, from_float32
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.index.threads import usable_cores

MANY_CORES = 8
"""Cores from which on unused compilations cost nothing."""
EXACT = IndexSpec.of("flat")
"""Searches short ranges and tokens without an index, with every kind."""
KEYS, LATER, DIM, QUERIES = 8448, 64, 64, 256
"""Of the index that is built to compile what builds one: enough for leaves, landmarks and a held-out share."""


def kernel_jobs(
    fmt: Format, spec: IndexSpec, tokens: int | None = None, *, retrieve_all: bool = False, serves_graphs: bool = False
) -> list[CompileJob]:
    """List compile jobs of reading `tokens` tokens (None: any number) and decoding, in the order of their first use.

    retrieve_all: some queries attend to all keys. serves_graphs: a GPU replays graphs that ask the host. With a few
    cores and a known number of tokens, of kinds that an index may turn out to be only the likeliest is compiled ahead.
    """
    name = fmt.value
    kinds = spec.possible_kinds(tokens) or (spec,)
    if tokens is not None and len(usable_cores()) < MANY_CORES:
        kinds = kinds[:1]
    arguments = [(name, one.kind, json.dumps(asdict(one.options), sort_keys=True)) for one in (*kinds, EXACT)]
    own = list(zip(kinds, arguments[:-1], strict=True))
    jobs = [CompileJob(f"{__name__}:code", given) for one, given in own if is_coded(one)]
    jobs += [CompileJob(f"{__name__}:{what}", given) for _, given in own for what in ("search", "build")]
    jobs += [CompileJob(f"{__name__}:step", (name,)), CompileJob(f"{__name__}:search", arguments[-1])]
    if retrieve_all:
        jobs.append(CompileJob(f"{__name__}:attend_all", (name,)))
    if serves_graphs:
        jobs.append(CompileJob(f"{__name__}:server"))
    return list(dict.fromkeys(jobs))


def early_jobs(
    fmt: Format, spec: IndexSpec, *, retrieve_all: bool = False, serves_graphs: bool = False
) -> list[CompileJob]:
    """Those of `kernel_jobs` that a read of any number of tokens has: all where the kind of index is known."""
    if not spec.possible_kinds():
        return kernel_jobs(fmt, spec, retrieve_all=retrieve_all, serves_graphs=serves_graphs)
    jobs = kernel_jobs(fmt, EXACT, retrieve_all=retrieve_all, serves_graphs=serves_graphs)
    return [job for job in jobs if job.target != f"{__name__}:build"]


def wait_for_builders(spec: IndexSpec, *, extends: bool = False) -> None:
    """Until other processes have compiled what builds indexes of this kind; extends: or inserts into them.

    The device waits meanwhile, with keys that are to be coded; it needs a small part of what is compiled.
    """
    wait_until_compiled(f"{__name__}:{'code' if is_coded(spec) and not extends else 'build'}")


def load_kernels(fmt: Format, spec: IndexSpec, kinds: Collection[str] | None = None) -> None:
    """Load into this process what decodes over keys with indexes of these kinds (None: any), or compile what is
    missing.
    """
    step(fmt.value)
    possible_kinds = (one for one in spec.possible_kinds() if kinds is None or one.kind in kinds)
    for one in dict.fromkeys([EXACT, spec, *possible_kinds]):
        one.compile_tasks(fmt)


def step(fmt: str) -> None:
    """One token's step: lists joined, the best attended to, threads; tokens that leave a window join clusters."""
    LayerStep(default_pool(), Format.from_name(fmt))
    prepare_sums(Format.from_name(fmt))


def search(fmt: str, kind: str, options: str) -> None:
    """The search tasks of one kind of index."""
    IndexSpec.of(kind, json.loads(options)).compile_tasks(Format.from_name(fmt))


def code(fmt: str, kind: str, options: str) -> None:
    """Building an index of a kind whose keys a device codes, without the device."""
    form, spec = Format.from_name(fmt), IndexSpec.of(kind, json.loads(options))
    keys = from_float32(np.random.default_rng(0).standard_normal((LATER, DIM), np.float32), form)
    spec.build(keys, form, _queries(LATER), coder=_no_codes)


def build(fmt: str, kind: str, options: str) -> None:
    """Building an index of one kind, judging it as `auto` does, and inserting later keys."""
    form, spec = Format.from_name(fmt), IndexSpec.of(kind, json.loads(options))
    path = _path(form, spec, KEYS + LATER)
    path.build_index(0, KEYS, _queries(QUERIES))
    index = path.segments[0].indexes[0]
    held_out = np.ascontiguousarray(_queries(QUERIES)[:, 0])
    index.search(held_out, 8)
    path.extend_index(KEYS + LATER)


def attend_all(fmt: str) -> None:
    """Attention to all keys, the reference."""
    attend_path(_path(Format.from_name(fmt), IndexSpec.of("flat"), LATER), _queries(1), 0, LATER, None, scale=1.0)


def server() -> None:
    """Compile the server that answers the layers of a graph."""
    compile_server()


def is_coded(spec: IndexSpec) -> bool:
    """Whether codes on a device are all there is to build."""
    return spec.keeps_codes(DIM)


class _NoCodes:
    """Make codes that are not kept."""

    def add(self, keys: np.ndarray) -> None:
        """See `index.device.KeyCodes`."""


def _no_codes(*given: object) -> _NoCodes:
    return _NoCodes()


def _path(fmt: Format, spec: IndexSpec, tokens: int) -> SequenceKV:
    """One key-value head of random keys."""
    numbers = np.random.default_rng(0).standard_normal((1, tokens, DIM), np.float32)
    rows = from_float32(numbers, fmt)
    path = SequenceKV(1, DIM, DIM, fmt, index=spec).reserve(2 * tokens)
    path.append(rows, rows)
    return path


def _queries(count: int) -> np.ndarray:
    """(2, count, DIM) float32: two heads that share the keys."""
    return np.random.default_rng(1).standard_normal((2, count, DIM), np.float32)
