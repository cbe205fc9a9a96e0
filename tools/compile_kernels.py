"""Compile every Triton kernel for GPUs that are not there: `python -m tools.compile_kernels`. Checks shared memory.

The launchers of the package run with tensors in host memory, so that argument types, block sizes, warps and stages are
those of a launch on the card; a launch only compiles, down to machine code. Needs Triton, which PyTorch for CPUs does
not install, and no GPU: `pip install triton==3.6.0`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.gpu.clusters.cluster import MAX_CLUSTERS
from retrieval_attn.gpu.clusters.mass import MEAN_DTYPE, MIN_CLUSTERS, ClusterMass
from retrieval_attn.gpu.codes.candidates import Candidates, Found, StoredRows, slots_for
from retrieval_attn.gpu.codes.host_row_gather import HostRowGather, RowShape
from retrieval_attn.gpu.codes.search import CodeSearch, CodeShape, EstimatedLogits, QuestionSearch, SearchScratch
from retrieval_attn.gpu.codes.streamer import BRING_WORDS
from retrieval_attn.gpu.decode.kernels import HostResult, WindowBuffers
from retrieval_attn.gpu.delta import Asked, DeltaRule, States
from retrieval_attn.gpu.expert_blocks import BlockLayout, ExpertBlocks, PlacedExperts
from retrieval_attn.gpu.packed import GROUPS, STRIP, TILE_ROWS, PackedWeights
from retrieval_attn.gpu.packed_experts import ExpertShape, PackedExperts, packed_shapes
from retrieval_attn.gpu.products import Attending, Gated, LinearWeights, Norm
from retrieval_attn.gpu.shared.partials import PagedKeys, plan_shape
from retrieval_attn.gpu.shared.plan import PAGE_TOKENS, SharedPlan

GPU = "retrieval_attn.gpu."
MODULES = (
    "attention.int8_triton", "attention.merge_triton", "capture.flag_triton", "clusters.mass_triton",
    "codes.codes_triton", "codes.named_triton", "codes.reach_triton", "codes.search_triton", "decode.kernels_triton",
    "delta_triton", "draw_triton", "packed_triton", "products_triton", "shared.shared_triton",
)  # fmt: skip
"""All modules with Triton kernels."""
KIB = 1024
CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32


class Card(NamedTuple):
    """A kind of GPU. shared: bytes of shared memory of a block at most. processors: multiprocessors."""

    capability: int
    shared: int
    processors: int


CARDS = (Card(86, 99 * KIB, 82), Card(89, 99 * KIB, 128), Card(120, 99 * KIB, 170), Card(90, 227 * KIB, 132))
"""RTX 3090, RTX 4090, RTX 5090 and H100."""
HEAD_DIMS = 64, 128, 256
WIDEST_DIM = 512
"""Gemma 4's, in 16 bits: float32 heads of it do not fit a consumer card's shared memory."""
KV_HEADS = 8


class Kernel(NamedTuple):
    """A compiled kernel. module: below `retrieval_attn.gpu`. shared: bytes of a block. options: block sizes, warps."""

    module: str
    name: str
    shared: int
    options: str


class Compiled(NamedTuple):
    """Kernels of a card, and messages of the ones that did not compile."""

    kernels: list[Kernel]
    failed: list[str]

    @property
    def names(self) -> set[str]:
        """Modules and names of the kernels."""
        return {f"{one.module}.{one.name}" for one in self.kernels}

    def most(self) -> dict[str, Kernel]:
        """Return the variant with the largest shared memory of each kernel, by module and name."""
        found: dict[str, Kernel] = {}
        for one in self.kernels:
            name = f"{one.module}.{one.name}"
            if name not in found or found[name].shared < one.shared:
                found[name] = one
        return found


def has_triton() -> bool:
    """Return whether Triton is installed with its compiler."""
    return importlib.util.find_spec("triton") is not None and importlib.util.find_spec("triton.backends") is not None


def all_kernels() -> set[str]:
    """Return module and name of each kernel of the package that is launched."""
    found = set()
    for module in MODULES:
        code = importlib.import_module(GPU + module)
        jits = (name for name, one in vars(code).items() if type(one).__name__ == "JITFunction")
        found |= {f"{module}.{name}" for name in jits if name.endswith("_kernel") and code.__name__ == GPU + module}
    return found


def compiled(card: Card, only: str = "") -> Compiled:
    """Compile all kernels for a card. only: part of the names of the modules."""
    found = Compiled([], [])
    launches = [one for one in LAUNCHES if only in one.__name__]
    with _compiling(card, found):
        for one in launches:
            one(card)
    return found


class _Driver:
    """Driver of a GPU that is not there."""

    def __init__(self, card: Card) -> None:
        from triton.backends.compiler import GPUTarget

        self._target, self._device = GPUTarget("cuda", card.capability, 32), card.capability

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return device


@contextmanager
def _compiling(card: Card, found: Compiled) -> Iterator[None]:
    """In this context launches compile for a card and append to `found`."""
    import triton
    from triton.runtime.jit import JITFunction

    launch, seen = JITFunction.run, set[int]()

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        module = kernel.__module__.removeprefix(GPU)
        try:
            made = launch(kernel, *given, grid=grid, warmup=True, **options)
        except Exception as error:
            found.failed.append(f"{module}.{kernel.__name__} {_told(options)}: {type(error).__name__}: {error}")
            return None
        if id(made) not in seen:
            seen.add(id(made))
            found.kernels.append(Kernel(module, kernel.__name__, made.metadata.shared, _told(options)))
        return made

    def overlap(device: torch.device) -> dict[str, Any]:
        return {"OVERLAP": True, "launch_pdl": True} if card.capability >= 90 else {"OVERLAP": False}

    replaced: list[tuple[Any, str, Any]] = [(JITFunction, "run", run)]
    for name in (*MODULES, "shared.partials"):
        module = importlib.import_module(GPU + name)
        facts = (
            ("overlap", overlap), ("processors", lambda _: card.processors), ("shared_bytes", lambda _: card.shared)
        )  # fmt: skip
        replaced += [(module, fact, value) for fact, value in facts if hasattr(module, fact)]
    active = triton.runtime.driver
    before = active._active
    active.set_active(_Driver(card))
    try:
        for where, name, value in replaced:
            patch = mock.patch.object(where, name, value)
            patch.start()
        yield
    finally:
        mock.patch.stopall()
        active.set_active(before)


def _told(options: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items() if isinstance(value, int) and len(name) < 12)


def _module(name: str) -> Any:
    return importlib.import_module(GPU + name)


def _empty(*sizes: int, dtype: torch.dtype = F32) -> Tensor:
    """Memory that is never written: no page of it is taken."""
    return torch.empty(sizes, dtype=dtype)


# -- launches, by module ---------------------------------------------------------------------------


def int8_triton(_: Card) -> None:
    kernels = _module("attention.int8_triton")
    for dim, dtype in product(HEAD_DIMS, (BF16, F32)):
        rows, packed = _empty(1000, dim, dtype=dtype), _empty(1000, dim + 4, dtype=torch.int8)
        kernels.pack(rows, packed, 1 / 127, 1e-30, 1e30, 127)
        kernels.unpack(packed, rows)


def merge_triton(_: Card) -> None:
    for dim, heads, queries in product(HEAD_DIMS, (1, 32), (1, 512)):
        part, lse = _empty(1, heads, queries, dim), _empty(1, heads, queries)
        _module("attention.merge_triton").merge_two(part, lse, part, lse)


def flag_triton(_: Card) -> None:
    kernels = _module("capture.flag_triton")
    line, number = _empty(4, dtype=torch.int32), _empty(1, dtype=torch.int64)
    kernels.ask(number, line)
    kernels.wait(line, line, number)
    kernels.fetch(_empty(5000), _empty(5000))


def draw_triton(_: Card) -> None:
    for rows in (1, 16):
        numbers, words = _empty(rows, 3, dtype=torch.float64), _empty(rows, 3, dtype=torch.int64)
        positions = _empty(rows, dtype=torch.int64)
        _module("draw_triton").choose(_empty(rows, 128256), _empty(rows), (numbers, words), positions, positions)


def kernels_triton(_: Card) -> None:
    """Attention to windows."""
    kernels = _module("decode.kernels_triton")
    kernels._count_kernel[(1,)](_empty(1, dtype=torch.int32), num_warps=1)
    sizes = (1, 1, 33), (8, 4, 1), (32, 1, 33)  # group, rows, splits
    grid = [*product(HEAD_DIMS, (BF16, F32), sizes, (1,)), (WIDEST_DIM, BF16, (8, 4, 33), 1)]
    grid += [*product(HEAD_DIMS, (BF16, F32), ((4, 1, 33), (8, 2, 33)), (2, 4, 8, 16))]
    for dim, dtype, (group, windows, splits), tokens in grid:
        rows = windows * tokens
        q_heads = KV_HEADS * group
        query, new = _empty(rows, q_heads, 1, dim, dtype=dtype), _empty(rows, KV_HEADS, 1, dim, dtype=dtype)
        window, span = _empty(windows, KV_HEADS, 1024, dim, dtype=dtype), _empty(windows, 2, dtype=torch.int32)
        places = None if rows == 1 else _empty(rows * q_heads, dtype=torch.int64)
        staged = _empty(rows * q_heads, dim)
        kernels.stage_queries(query, staged, places)
        for bare in (True, False):
            valid = None if bare else _empty(windows, 1024, dtype=torch.bool)
            asked = (0.1, None, None) if bare else (0.1, 30.0, 512)
            parts = kernels.window_partials(query, new, new, WindowBuffers(window, window, span, valid), *asked, splits)
            lse = _empty(rows * q_heads)
            tally = None if bare else (lse, _empty(rows * q_heads, 2))
            host = HostResult(staged, lse, places, tally)
            rest, sinks = (None, None) if bare else ((staged, lse), _empty(q_heads, dtype=dtype))
            kernels.merge_parts(parts, host, sinks, dtype, rest, rest)


class Sizes(NamedTuple):
    """Sizes of a model's layer."""

    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int


MODELS = Sizes(4096, 14336, 32, 8, 128), Sizes(896, 4864, 14, 2, 64), Sizes(3584, 14336, 16, 8, 256)
"""Llama-3-8B, Qwen2.5-0.5B, Gemma-2-9B: others have the same tiles, or smaller ones."""


def _multiply(kernels: Any, sizes: Sizes, rows: int, dtype: torch.dtype, weights: Callable[..., Any]) -> None:
    """Launch all products of a layer. weights: makes weights of a shape, with or without a bias."""
    dim, norm = sizes.head_dim, Norm(_empty(sizes.hidden, dtype=dtype), 1e-6)
    hidden, head_norm = _empty(rows, sizes.hidden, dtype=dtype), Norm(_empty(dim, dtype=dtype), 1e-6, True)
    rotation = _empty(rows, dim, dtype=dtype), _empty(rows, dim, dtype=dtype)
    for bias, own in ((False, None), (True, None), (False, head_norm)):
        query, kv = (weights(heads * dim, sizes.hidden, bias) for heads in (sizes.q_heads, sizes.kv_heads))
        kernels.project(hidden, Attending(norm, query, kv, kv, dim, own, own), rotation)
    gates = weights(2 * sizes.q_heads * dim, sizes.hidden, False)
    turned = _empty(rows, dim // 4, dtype=dtype)
    into = Attending(head_norm._replace(weight=norm.weight), gates, kv, kv, dim, head_norm, head_norm, dim // 4, True)
    kernels.project(hidden, into, (turned, turned))
    for bias in (False, True):
        up, down = weights(sizes.inner, sizes.hidden, bias), weights(sizes.hidden, sizes.inner, bias)
        kernels.two_products(hidden, norm, up, up)
        kernels.gated(hidden, Gated(norm, up, up))
        kernels.add_product(hidden, _empty(rows, sizes.inner, dtype=dtype), down)


def products_triton(_: Card) -> None:
    def weights(dtype: torch.dtype) -> Callable[..., LinearWeights]:
        return lambda out, width, bias: LinearWeights(
            _empty(out, width, dtype=dtype), _empty(out, dtype=dtype) if bias else None
        )

    for sizes, rows in product(MODELS, (1, 4)):
        _multiply(_module("products_triton"), sizes, rows, BF16, weights(BF16))
    for dtype, rows in product((torch.float16, F32), (1, 4)):
        _multiply(_module("products_triton"), MODELS[0], rows, dtype, weights(dtype))


def packed_triton(_: Card) -> None:
    def packed(group: int) -> Callable[..., PackedWeights]:
        def make(out: int, width: int, bias: bool) -> PackedWeights:
            strips = -(-width // STRIP)
            strips = -(-strips * STRIP // max(group, STRIP)) * max(group, STRIP) // STRIP
            words = _empty(out // TILE_ROWS, strips, 32, 4, dtype=torch.int32)
            scales = _empty(strips * STRIP // group, out, 2, dtype=BF16)
            return PackedWeights(words, scales, width, _empty(out, dtype=BF16) if bias else None)

        return make

    kernels = _module("packed_triton")
    grid = [*product(MODELS[:1], (1, 4, 16), GROUPS), *product(MODELS[1:], (1, 16), (64,))]
    for sizes, rows, group in grid:
        _multiply(kernels, sizes, rows, BF16, packed(group))
        kernels.matrix(packed(group)(sizes.hidden, sizes.hidden, False))
    for rows, bias in product((1, 4, 40), (False, True)):
        kernels.add_product(None, _empty(rows, MODELS[0].hidden, dtype=BF16), packed(64)(1024, MODELS[0].hidden, bias))
    _experts()


def _experts() -> None:
    """Experts in one tensor and in blocks, of GPT-OSS's and Qwen3-30B-A3B's sizes."""
    for shape, group, floats, visited in (
        (ExpertShape(8, 5760, 2880), 32, True, 4), (ExpertShape(8, 2880, 2880), 32, True, 4),
        (ExpertShape(8, 1536, 2048), 64, False, 8),
    ):  # fmt: skip
        words, scales = packed_shapes(shape, group)
        whole = PackedExperts(
            PackedWeights(
                _empty(*words, dtype=torch.int32), _empty(*scales, dtype=BF16), shape.columns, floats=floats
            ),
            shape.experts,
        )  # fmt: skip
        layout = BlockLayout(shape, group, floats)
        rows = _empty(shape.experts, layout.nbytes, dtype=torch.uint8)
        placed = PlacedExperts(ExpertBlocks.of(layout, rows[:2], rows[2:], rows[2:]), shape.experts)
        kernels, bias = _module("packed_triton"), _empty(shape.experts, shape.out, dtype=BF16)
        kernels.widen_block(layout, rows[0], _empty(shape.out, shape.columns, dtype=BF16))
        for tokens in (1, 4, 16):
            given = _empty(tokens, shape.columns, dtype=BF16), _empty(tokens, visited, dtype=torch.int64)
            kernels.expert_products(*given, whole, bias)
            for counted in (False, True):
                kernels.placed_products(*given, placed, bias, counted=counted)


def delta_triton(_: Card) -> None:
    for dim, rows, dtype in product((64, 128), (1, 4), (BF16, F32)):
        k_heads, v_heads = 16, 32
        channels = 2 * k_heads * dim + v_heads * dim
        taps, small = _empty(channels, 4, dtype=dtype), _empty(v_heads)
        for bias in (None, _empty(channels, dtype=dtype)):
            rule = DeltaRule(taps, bias, small, small, _empty(dim, dtype=dtype), 1e-6, k_heads, v_heads, dim, dim)
            wide, heads = _empty(rows, v_heads * dim, dtype=dtype), _empty(rows, v_heads, dtype=dtype)
            asked = Asked(_empty(rows, channels, dtype=dtype), wide, heads, heads)
            states = States(_empty(rows, channels, 4, dtype=dtype), _empty(rows, v_heads, dim, dim))
            _module("delta_triton").delta_step(asked, rule, states)


def shared_triton(_: Card) -> None:
    """Attention to pages that rows share."""
    queries = (4, 1), (8, 4), (4, 16), (8, 16)  # of a key-value head, and rows: tiles of 16 to 128
    grid = [
        *product(HEAD_DIMS, queries, ("bf16", "f32", "int8")),
        *product((WIDEST_DIM,), queries[:1], ("bf16", "int8")),
    ]
    for dim, (group, rows), kind in grid:
        dtype, pages = F32 if kind == "f32" else BF16, 64
        key = _empty(KV_HEADS, pages, PAGE_TOKENS, dim, dtype=torch.int8 if kind == "int8" else dtype)
        value = key.transpose(2, 3).contiguous() if kind == "int8" else key
        steps = _empty(2, KV_HEADS, pages, PAGE_TOKENS) if kind == "int8" else None
        for exact in (False, True) if kind == "int8" else (kind == "f32",):
            pool = PagedKeys(key, value, steps)
            shape = plan_shape(pool, rows, KV_HEADS * group, exact=exact)
            query = _empty(rows, KV_HEADS * group, 1, dim, dtype=F32 if exact else dtype)
            for softcap in (None, 30.0) if dim == 128 else (None,):
                _module("shared.shared_triton").shared_partials(query, pool, SharedPlan(shape, CPU), 0.1, softcap)


def codes_triton(_: Card) -> None:
    kernels = _module("codes.codes_triton")
    for dim, share, dtype in product(HEAD_DIMS, (1, 2, 4), (BF16, F32)):
        key_bytes = dim // share
        split = {1: (dim, 0, 0), 2: (0, dim, 0), 4: (0, 0, dim)}[share]
        keys, codes = _empty(1000, dim, dtype=dtype), _empty(1000, key_bytes, dtype=torch.uint8)
        kernels.encode(keys, _empty(dim, dim), _empty(dim), split, codes, _empty(1, dtype=torch.int32))
    for entries in (1, 8, 32):
        kernels.bring(_empty(entries, BRING_WORDS, dtype=torch.int64))


def named_triton(_: Card) -> None:
    """Attention to named keys on the device."""
    kernels = _module("codes.named_triton")
    for dim, dtype, (room, k) in product(HEAD_DIMS, (BF16, F32, torch.int8), ((160, 100), (1024, 512), (4096, 2048))):
        wide, members = dim + 4 * (dtype == torch.int8), 4
        rows = StoredRows(*(_empty(KV_HEADS, 4096, wide, dtype=dtype) for _ in range(2)))
        count, slots = KV_HEADS * members, slots_for(room, k)
        named = Candidates(_empty(count, room, dtype=torch.int32), 0, 4096, k)
        found = Found(_empty(count, slots, dtype=torch.int32), _empty(count, slots), room)
        kernels.score(_empty(KV_HEADS, members, dim), rows, named, found)
        into = Partial(_empty(KV_HEADS, members, dim), _empty(KV_HEADS, members))
        kernels.attend(rows, k, found, (0.1, None), into)


def reach_triton(_: Card) -> None:
    """Attention to named keys in host memory."""
    group, rows = 4, 1
    for dim, room in product(HEAD_DIMS, (160, 480, 4096)):
        count = rows * KV_HEADS * group
        gather, ids = HostRowGather(rows * KV_HEADS, RowShape(dim, dim), CPU), _empty(count, room, dtype=torch.int32)
        into = Partial(_empty(count, dim), _empty(count))
        for told in (None, _empty(count, room)):
            query = _empty(rows, KV_HEADS * group, 1, dim, dtype=BF16)
            _module("codes.reach_triton").reach(gather, query, ids, Scoring(0.1), into, told)


CODES = (
    CodeShape(16, 400), CodeShape(24, 400), CodeShape(40, 400), CodeShape(64, 200), CodeShape(128, 200),
    CodeShape(256, 200), CodeShape(24, 1600, 64, 400), CodeShape(64, 4000),
)  # fmt: skip


def search_triton(_: Card) -> None:
    """Search of codes, for steps and for questions, with and without clusters."""
    kernels, mass = _module("codes.search_triton"), _module("clusters.mass_triton")
    grid = [*product(HEAD_DIMS, ((4, 1), (8, 4), (4, 0)), CODES, (1 << 17,))]
    grid += product((128,), ((4, 1), (4, 4)), (CodeShape(24, 400), CodeShape(64, 200)), (1 << 12, 1 << 20))
    for dim, (group, rows), shape, keys in grid:  # no rows: a question
        if not dim // 8 <= max(shape.key_bytes, shape.finer_bytes) <= dim:
            continue
        batch, q_heads = max(1, rows), KV_HEADS * group
        if rows:
            search, query = CodeSearch(rows, q_heads, KV_HEADS, shape, CPU), _empty(rows, q_heads, 1, dim, dtype=BF16)
        else:
            search = QuestionSearch(KV_HEADS, 16 * group, shape, CPU)
            q_heads, query = 16 * q_heads, _empty(1, 16 * q_heads, 1, dim)
        count = batch * q_heads
        scratch = SearchScratch(count, keys, shape.picked_room, CPU, has_memory=False)
        if not scratch.suits_kernels:
            continue
        ids = _empty(count, shape.room, dtype=torch.int32)
        places = None if rows == 1 else _empty(count, dtype=torch.int64)
        search.told = EstimatedLogits(_empty(count, shape.room), shape.named // 4) if group == 4 else None
        (turn,) = scratch.turns(len(search.entries), q_heads // KV_HEADS)
        kernels.search(search, query, ids, places, scratch, None, 0.1)
        for clusters in (MIN_CLUSTERS, 64, MAX_CLUSTERS) if shape == CODES[3] else (MAX_CLUSTERS,):
            own = ClusterMass(len(search.entries), clusters, dim, MEAN_DTYPE, CPU)
            mass.estimate(own, search, query, Scoring(0.1), scratch, turn, own.room(count))


LAUNCHES = (
    int8_triton, merge_triton, flag_triton, draw_triton, kernels_triton, products_triton, packed_triton, delta_triton,
    shared_triton, codes_triton, named_triton, reach_triton, search_triton,
)  # fmt: skip


def main() -> int:
    """Print the largest shared memory of each kernel by card. Return 1 if one fails or needs more than its card has."""
    parser = argparse.ArgumentParser(description="compile every Triton kernel for GPUs that are not there")
    parser.add_argument("--capabilities", default="86,89,120,90", help="compute capabilities (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="PART", help="compile modules with PART in their name alone")
    options = parser.parse_args()
    if not has_triton():
        raise SystemExit("Triton is needed to compile its kernels, and is not installed: pip install triton==3.6.0")
    wanted = [int(one) for one in options.capabilities.split(",")]
    cards = [one for one in CARDS if one.capability in wanted]
    found = {card: compiled(card, options.only) for card in cards}
    most = {card: one.most() for card, one in found.items()}
    wrong = [f"sm_{card.capability}: {message}" for card, one in found.items() for message in one.failed]
    print(f"{'kernel':45}{'variants':>9}" + "".join(f"{f'sm_{card.capability}':>10}" for card in cards))
    for name in sorted(set().union(*most.values())):
        counts = [sum(f"{one.module}.{one.name}" == name for one in each.kernels) for each in found.values()]
        sizes = [f"{most[card][name].shared / KIB:10.1f}" if name in most[card] else f"{'-':>10}" for card in cards]
        print(f"{name:45}{max(counts):9}{''.join(sizes)}")
        wrong += [
            f"sm_{card.capability}: {name} needs {one.shared:,} bytes of {card.shared:,} ({one.options})"
            for card in cards
            if (one := most[card].get(name)) is not None and one.shared > card.shared
        ]
    for message in wrong:
        print(message, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
