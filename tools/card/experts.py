"""What a token takes if experts in 4 bits exceed the card, with uniform and with Zipf routing.

python -m tools.card.experts --shape gpt-oss-120b --length 128k --gpu-memory 24GiB --read-window 4k --out FOLDER

A shape of RANDOM_SHAPES with random experts, as many of them in host memory as the plan says. One text is read, then
answers of a stream are timed for each routing, which replaces the router's choice and not its work: uniform; Zipf (the
chance of an expert falls with its rank, which differs by layer); Zipf once the experts of the highest ranks have moved
to the card. A token's time is the mean between an answer's first piece of text and its last, of the last of three.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import retrieval_attn as ra
from retrieval_attn.gpu.memory import cap
from retrieval_attn.memory.plan import Plan, plan
from retrieval_attn.memory.units import GIB, parse_bytes
from retrieval_attn.model.experts import has_packed_experts
from retrieval_attn.model.layers import expert_counts
from retrieval_attn.model.loading import choose_device
from retrieval_attn.model.placed_experts import expert_buffer
from retrieval_attn.model.quantization import held_bytes
from retrieval_attn.offload.managed import move_table
from retrieval_attn.runner.graph import pool as graph_pool
from retrieval_attn.runner.ready import move_experts
from retrieval_attn_eval.bench.random_model import RANDOM_SHAPES, has_float_experts, random_config, random_model
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from retrieval_attn_eval.flags import as_tokens
from tools.card.near import near_reads
from tools.card.subject import add_card_flags, answered, recorded

SHAPES = [name for name, sizes in RANDOM_SHAPES.items() if "model_type" in sizes]
BITS = 24
ALL = 1 << 20


class Routing(NamedTuple):
    """name: of the row. exponent: of Zipf's law, 0 for uniform routing; None: the router's own. moved: whether the most
    visited experts have moved before.
    """

    name: str
    exponent: float | None
    moved: bool = False


def planned(shape: str, layers: int | None, length: int, gpu_memory: str, config: ra.Config) -> Plan:
    """The plan for such a checkpoint, with its experts in 4 bits."""
    model_config = random_config(shape, layers=layers)
    if has_float_experts(shape):
        model_config.quantization_config = {"quant_method": "mxfp4"}
        return plan(model_config, length, gpu_memory, config=config)
    return plan(model_config, length, gpu_memory, config=config, quantization="int4")


class Router:
    """Draws of distinct experts from a distribution, of the numbers of tokens alone: a graph captures it."""

    def __init__(self, module: Any, experts: int, exponent: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        device = next(iter(module.parameters())).device
        ranks = torch.randperm(experts, generator=generator) + 1
        self.module, self._own = module, module.forward
        self.weights = (-exponent * ranks.double().log()).float().to(device)
        self._steps = (torch.randint(1 << 22, (experts,), generator=generator) * 2 + 1).to(device)
        self._starts = torch.randint(1 << BITS, (experts,), generator=generator).to(device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, visited = top_k_index.shape
        place = self._count + torch.arange(tokens, device=self._count.device)
        self._count.add_(tokens)
        bits = (place[:, None] * self._steps + self._starts) & ((1 << BITS) - 1)
        uniform = (bits.float() + 0.5) / (1 << BITS)
        chosen = (self.weights - (-uniform.log()).log()).topk(visited, dim=1).indices  # Gumbel: in proportion
        found: Tensor = self._own(hidden_states, chosen, top_k_weights)
        return found


@contextmanager
def routed(model: Any, exponent: float | None) -> Iterator[None]:
    """Within, tokens visit experts drawn by Zipf's law; None: as the router chooses."""
    graph_pool.forget(model)
    drawn = [] if exponent is None else routers(model, exponent)
    for router in drawn:
        router.module.forward = router
    try:
        yield
    finally:
        for router in drawn:
            del router.module.forward
        graph_pool.forget(model)


def routers(model: Any, exponent: float) -> list[Router]:
    """One for each layer, the same in each call."""
    _, experts = expert_counts(model.config.get_text_config(decoder=True))
    modules = [one for one in model.modules() if has_packed_experts(one)]
    return [Router(module, experts or 1, exponent, number) for number, module in enumerate(modules)]


def bus_share(model: Any) -> float | None:
    """Share of the counted visits to experts in host memory; None: none is there."""
    buffer = expert_buffer(model)
    if buffer is None:
        return None
    on_host = total = 0
    for layer in buffer.layers:
        visits = layer[0].counts.tolist()
        total += sum(visits)
        on_host += sum(count for expert, count in enumerate(visits) if layer[0].is_on_host(expert))
    return on_host / max(1, total)


def forget_visits(model: Any) -> None:
    """Set all counts to 0."""
    buffer = expert_buffer(model)
    for layer in () if buffer is None else buffer.layers:
        layer[0].counts.zero_()


def moved_experts(model: Any, exponent: float) -> dict[str, Any]:
    """Move the experts that such a routing visits most, by their chances."""
    buffer = expert_buffer(model)
    for layer, router in () if buffer is None else zip(buffer.layers, routers(model, exponent), strict=True):
        layer[0].counts.copy_((1e6 * router.weights.softmax(0)).int())
    began, moved = time.perf_counter(), 0
    while more := move_experts(model, ALL):
        moved += more
    return {"moved": moved, "move_seconds": time.perf_counter() - began}


def measured(model: Any, context: ra.Context, ids: list[int], way: Routing, tokens: int, needed: Plan) -> Any:
    """A row."""
    row: dict[str, Any] = {"routing": way.name, "exponent": way.exponent}
    if way.moved:
        row |= moved_experts(model, way.exponent or 0.0)
    forget_visits(model)
    with routed(model, way.exponent):
        row |= answered(context, ids, tokens)
    share, sizes = bus_share(model), needed.shape.routed
    if share is not None and sizes is not None:
        row["host_share"] = share
        row["bus_gb"] = share * sizes.block_bytes * sizes.layers * sizes.visited / 1e9
        row["least_gb_per_second"] = 1000 * row["bus_gb"] / row["token_ms"]
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> int:
    """Measure, and write found.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="gpt-oss-120b", choices=SHAPES)
    parser.add_argument("--length", type=as_tokens, default=131072, help="of the text (default: %(default)s)")
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law (default: %(default)s)")
    parser.add_argument("--host-experts", type=int, metavar="N", help="of each layer (default: what the plan says)")
    add_card_flags(parser)
    args = parser.parse_args()
    device, config = choose_device(args.device), ra.Config(prefill_chunk=args.prefill_chunk)
    if device.type == "cuda":
        cap(device, parse_bytes(args.gpu_memory, "gpu_memory"))
    needed = planned(args.shape, args.layers, args.length, args.gpu_memory, config)
    print(needed, file=sys.stderr, flush=True)
    sizes = needed.shape.routed
    on_host = args.host_experts if args.host_experts is not None else 0 if sizes is None else sizes.on_host
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    began = time.perf_counter()
    model = random_model(args.shape, dtype, args.seed, device, args.layers, on_host)
    found: dict[str, Any] = {
        "shape": args.shape, "layers": args.layers, "length": args.length, "read_window": args.read_window,
        "host_experts": on_host, "made_seconds": time.perf_counter() - began,
        "host_table": device.type == "cuda" and bool(needed.shape.host_table_bytes) and move_table(model),
        "weights_gib": held_bytes(model) / GIB, "planned_gib": needed.shape.weight_bytes / GIB,
        "estimates_ms": {one.gpu: one.retrieval_ms for one in needed.speeds},
    }  # fmt: skip
    model.generation_config.eos_token_id = []
    gc.collect()
    gc.freeze()
    ra.enable(model, config)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (args.length,), generator=torch.Generator().manual_seed(args.seed)).tolist()
    rows: list[dict[str, Any]] = []
    with recorded(args, found, rows):
        context = ra.Context(model, number_tokenizer(vocabulary), config)
        began = time.perf_counter()
        with near_reads(args.read_window), routed(model, 0.0):
            context.read(ids, progress=False)
        found["read_seconds"] = time.perf_counter() - began
        found["index"] = context.cache.index.config.to_dict()["index_options"]
        ways = [
            Routing("uniform", 0.0), Routing("zipf", args.exponent), Routing("zipf, moved", args.exponent, True),
            Routing("router", None),
        ]  # fmt: skip
        for way in ways:
            rows.append(measured(model, context, ids, way, args.tokens, needed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
