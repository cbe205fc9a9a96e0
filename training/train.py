"""Train the bundled retrieval model from nothing, short contexts first, on one GPU.

Every stage writes OUT/<stage>.pt (weights and optimizer) and OUT/model (Hugging Face folder, bf16); a later
call goes on after the last finished stage, so the whole run may be cut into several commands:

    python training/train.py --out OUT --filler DIR
    torchrun --nproc-per-node 4 training/train.py --out OUT --filler DIR    # every GPU adds its own rows to each step
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional as F
from torch.utils.data import DataLoader

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from training.data import KINDS, MIXTURES, Batches, Source  # noqa: E402
from training.model import Shape, TinyLlama, save  # noqa: E402

MICRO_TOKENS = 262_144


@dataclass(frozen=True)
class Part:
    """What one step reads at one length: rows of `length` tokens with up to `asks` questions each."""

    length: int
    rows: int
    asks: int
    stretch: float = 0.5


@dataclass(frozen=True)
class Stage:
    """Ends after `steps` or `seconds`, whichever is first, with the learning rate at 5 %.

    Every step takes the mean loss of its parts. cool: share of rows (below 131,072 tokens) whose attention
    scores are scaled by .75 to 1, which blurs them as a longer context would.
    """

    name: str
    parts: tuple[Part, ...]
    steps: int
    seconds: float
    lr: float
    repeat: float = 0.3  # mixture weight of plain copying
    mixture: str = "base"
    cool: float = 0.0
    ramp: int = 20  # steps of warm-up


_ALL = (Part(2048, 64, 10), Part(8192, 16, 20), Part(32768, 4, 40), Part(131072, 1, 160, 0.0))

STAGES = (
    Stage("copy", (Part(256, 1024, 2, 0.0),), 1200, 75, 2e-3, 40.0, ramp=200),
    Stage("512", (Part(512, 512, 4, 0.3),), 1500, 110, 2e-3, 2.0),
    Stage("2048", (Part(2048, 128, 10),), 900, 80, 1.5e-3),
    Stage("8192", (Part(8192, 32, 24),), 700, 100, 1.2e-3),
    Stage("8192b", (Part(8192, 32, 12),), 900, 120, 1.5e-3),
    Stage("32768", (Part(32768, 8, 32),), 400, 110, 1e-3),
    Stage("131072a", (Part(131072, 4, 64, 0.0),), 200, 240, 5e-4, ramp=10),
    Stage("2048b", (Part(2048, 128, 8),), 2000, 110, 1.5e-3),
    Stage("8192c", (Part(8192, 32, 12),), 700, 70, 1e-3),
    Stage("32768b", (Part(32768, 8, 16),), 400, 70, 8e-4),
    Stage("131072b", (Part(131072, 4, 32, 0.0),), 200, 200, 5e-4, ramp=10),
    # high rates at short lengths only: at 32,768 a rate of 8e-4 undid what 2,048 had learned of lists
    Stage("2048c", (Part(2048, 128, 8),), 2500, 140, 1e-3, 0.2, "lists"),
    Stage("8192d", (Part(8192, 32, 12),), 900, 75, 5e-4, 0.2, "lists"),
    Stage("32768c", (Part(32768, 8, 20),), 400, 85, 3e-4, 0.1, "long"),
    Stage("131072c", (Part(131072, 4, 40, 0.0),), 200, 230, 4e-4, 0.1, "long", ramp=10),
    # all lengths in every step: a stage at one length undoes what another one learned
    Stage("2048d", (Part(2048, 64, 10),), 5000, 90, 1e-3, 0.2, "lists", cool=0.5),
    Stage("to32768", (Part(2048, 64, 10), Part(8192, 16, 20), Part(32768, 4, 40)), 2000, 150, 8e-4, 0.2, "lists", 0.5),
    Stage("all", _ALL, 1000, 230, 4e-4, 0.1, "last", 0.3, 10),
)


def parse_stage(text: str) -> Stage:
    """Stage name, or name:seconds, or name:seconds:lr."""
    name, *rest = text.split(":")
    found = next((stage for stage in STAGES if stage.name == name), None)
    if found is None:
        raise argparse.ArgumentTypeError(f"stage {name!r} is unknown; choose from {[s.name for s in STAGES]}")
    numbers = [float(item) for item in rest]
    return replace(found, seconds=(numbers or [found.seconds])[0], lr=(numbers[1:] or [found.lr])[0])


def choose_attention(length: int, device: str) -> str:
    """Time flash and cuDNN attention on this shape and enable the faster one that agrees with flash."""
    if device != "cuda":
        return "cpu"
    rows = max(1, min(MICRO_TOKENS, 131072) // length)
    times: dict[str, float] = {}
    reference: Tensor | None = None
    for name in ("flash", "cudnn"):
        torch.backends.cuda.enable_flash_sdp(name == "flash")
        torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.manual_seed(0)
        q = torch.randn(rows, length, 8, 64, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        k, v = (
            torch.randn(rows, length, 2, 64, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
            for _ in range(2)
        )
        try:
            for turn in range(3):
                if turn == 1:
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                out.sum().backward()
            torch.cuda.synchronize()
            error = 0.0 if reference is None else float((out - reference).abs().max())
            reference = out.detach() if reference is None else reference
            if error < 0.02:
                times[name] = time.perf_counter() - start
            print(
                f"attention {name} at {length}: {(time.perf_counter() - start) / 2:.4f} s, error {error:.4f}",
                flush=True,
            )
        except RuntimeError as failure:
            print(f"attention {name} at {length}: not usable ({str(failure).splitlines()[0]})", flush=True)
    best = min(times, key=lambda n: times[n])
    torch.backends.cuda.enable_flash_sdp(best == "flash")
    torch.backends.cuda.enable_cudnn_sdp(best == "cudnn")
    return best


class Tally:
    """Running exact-match rate per task kind, kept on the device until it is read."""

    def __init__(self, device: str) -> None:
        self.asked = torch.zeros(len(KINDS), device=device)
        self.right = torch.zeros(len(KINDS), device=device)
        self.tokens = torch.zeros(2, device=device)

    def add(self, wrong_per_answer: Tensor, kinds: Tensor, wrong: Tensor) -> None:
        self.tokens += torch.stack((wrong.sum(), torch.tensor(float(wrong.numel()), device=wrong.device)))
        self.asked.index_add_(0, kinds, torch.ones_like(kinds, dtype=torch.float32))
        self.right.index_add_(0, kinds, (wrong_per_answer == 0).float())

    def read(self) -> list[float]:
        if distributed.is_initialized():
            for counts in (self.asked, self.right, self.tokens):
                distributed.all_reduce(counts)
        rates = (self.right / self.asked.clamp(min=1)).tolist()
        seen = self.asked.tolist()
        self.accuracy = 1 - float(self.tokens[0] / self.tokens[1].clamp(min=1))
        self.tokens.zero_()
        self.asked.zero_()
        self.right.zero_()
        return [rate if n else math.nan for rate, n in zip(rates, seen, strict=True)]


def micro_loss(model: TinyLlama, batch: dict[str, Tensor], tally: Tally, cool: float) -> Tensor:
    """Mean answer-token loss (first two tokens of an answer count twice) + 0.1 x loss on 4,096 positions.

    A row counts by the square root of its answer tokens, so that one list is not lost beside forty UUIDs.
    """
    ids, weights = batch["ids"], batch["weights"][:, 1:]
    heat = torch.rand(len(ids), 1, 1, 1, device=ids.device)
    heat = torch.where(torch.rand_like(heat) < cool, 0.75 + 0.25 * heat, torch.ones_like(heat))
    states = model.hidden(ids, batch["positions"], heat)[:, :-1]
    targets = ids[:, 1:]
    where = weights > 0
    wanted = targets[where]
    logits = model.logits(states[where]).float()
    each = F.cross_entropy(logits, wanted, reduction="none")
    share = weights.float().sum(1, keepdim=True).clamp(min=1).rsqrt()
    weight = (weights * share)[where]
    answer = (each * weight).sum() / weight.sum()
    with torch.no_grad():
        wrong = (logits.argmax(-1) != wanted).float()
        ends = batch["ends"][:, 1:][where].long()
        segment = ends.cumsum(0) - ends
        total = int(ends.sum())
        rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(where)[where]
        per_answer = torch.zeros(total, device=ids.device).index_add_(
            0, segment[segment < total], wrong[segment < total]
        )
        tally.add(per_answer, batch["kinds"][rows[ends.bool()]], wrong)
    flat = torch.randint(0, targets.numel(), (4096,), device=ids.device)
    text = F.cross_entropy(
        model.logits(states.reshape(-1, states.shape[-1])[flat]).float(), targets.reshape(-1)[flat], ignore_index=2
    )
    return answer + 0.1 * text


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def from_first(seconds: float, device: str) -> float:
    """The first process's clock, so that all stop and log at the same step."""
    if not distributed.is_initialized():
        return seconds
    clock = torch.tensor([seconds], dtype=torch.float64, device=device)
    distributed.broadcast(clock, 0)
    return float(clock)


def average_gradients(model: TinyLlama) -> None:
    if not distributed.is_initialized():
        return
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def run_stage(
    model: TinyLlama,
    optimizer: torch.optim.Optimizer,
    stage: Stage,
    source: Source,
    args: argparse.Namespace,
    seconds: float,
) -> dict[str, Any]:
    """Train one stage in place; returns its record (seconds, steps, exact-match rate per kind)."""
    device = args.device
    backend = choose_attention(max(part.length for part in stage.parts), device)
    base = [*MIXTURES[stage.mixture][:-1], stage.repeat]
    loaders, tallies, counts, shares = [], [], [], []
    for number, part in enumerate(stage.parts):
        micro_rows = max(1, min(part.rows, MICRO_TOKENS // part.length))
        counts.append(max(1, part.rows // micro_rows))
        weights = multiprocessing.Array("d", base)
        shares.append(weights)
        seed = args.seed + 1000 * rank()
        batches = Batches(source, part.length, micro_rows, part.asks, part.stretch, seed, weights)
        workers = args.workers // len(stage.parts) + (number == len(stage.parts) - 1) * (
            args.workers % len(stage.parts)
        )
        loaders.append(
            iter(DataLoader(batches, batch_size=None, num_workers=workers, prefetch_factor=4 if workers else None))
        )
        tallies.append(Tally(device))
    rates = [[math.nan] * len(KINDS) for _ in stage.parts]
    start = last = from_first(time.monotonic(), device)
    step, first = 0, 0.0
    while True:
        now = from_first(time.monotonic(), device)
        if step == 3:  # the first steps compile
            first = now - start
        progress = max(step / stage.steps, (now - start) / seconds)
        if progress >= 1:
            break
        if now - last > args.log_seconds:
            last = now
            for part, tally, known, weights in zip(stage.parts, tallies, rates, shares, strict=True):
                fresh = tally.read()
                known[:] = [old if math.isnan(new) else new for new, old in zip(fresh, known, strict=True)]
                with weights.get_lock():
                    for i, rate in enumerate(known):
                        error = 0.3 if math.isnan(rate) else 1 - rate
                        weights[i] = base[i] * (0.3 + min(2 * error, 0.7))
                shown = " ".join(f"{k}={100 * r:.0f}" for k, r in zip(KINDS, known, strict=True))
                if rank() == 0:
                    print(
                        f"[{stage.name}/{part.length}] {now - start:.0f}s (compiled {first:.0f}s) step {step}"
                        f" acc {tally.accuracy:.3f} | {shown}",
                        flush=True,
                    )
            if stage.name == "copy" and tallies[0].accuracy > 0.97:
                break
        warm = min(1.0, (step + 1) / stage.ramp)
        for group in optimizer.param_groups:
            group["lr"] = stage.lr * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        for part, loader, tally, micro in zip(stage.parts, loaders, tallies, counts, strict=True):
            cool = stage.cool if part.length < 131072 else 0.0
            for _ in range(micro):
                batch = {name: t.to(device, non_blocking=True) for name, t in next(loader).items()}
                with torch.autocast(device, dtype=torch.bfloat16):
                    loss = micro_loss(model, batch, tally, cool) / (micro * len(stage.parts))
                loss.backward()
        average_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
    del loaders
    return {
        "stage": stage.name,
        "seconds": time.monotonic() - start,
        "steps": step,
        "parts": [vars(part) for part in stage.parts],
        "gpus": distributed.get_world_size() if distributed.is_initialized() else 1,
        "lr": stage.lr,
        "attention": backend,
        "last_window": [dict(zip(KINDS, known, strict=True)) for known in rates],
        "token_accuracy": [tally.accuracy for tally in tallies],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the model")
    parser.add_argument("--tokenizer", type=Path, default=Path("retrieval_attn/model/bundled"), help="tokenizer folder")
    parser.add_argument(
        "--filler", type=Path, help="folder of .txt files with ordinary English (optional, recommended)"
    )
    parser.add_argument("--stages", type=parse_stage, nargs="+", default=list(STAGES), metavar="NAME[:SECONDS[:LR]]")
    parser.add_argument("--init", type=Path, help="weights-only start from a model folder")
    parser.add_argument("--max-seconds", type=float, default=1e9, help="stop (with a checkpoint) after this long")
    parser.add_argument("--workers", type=int, default=14, help="data processes")
    parser.add_argument("--log-seconds", type=float, default=15, help="seconds between progress lines")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, help="rows per step of every stage (for trying things out)")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--layers", type=int, default=5)
    args = parser.parse_args()
    begin = time.monotonic()
    from transformers import AutoTokenizer

    if "RANK" in os.environ:
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(args.seed + rank())
    torch.set_float32_matmul_precision("high")
    source = Source(AutoTokenizer.from_pretrained(args.tokenizer), args.filler)
    print(f"data ready after {time.monotonic() - begin:.1f} s", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    model = TinyLlama(Shape(num_hidden_layers=args.layers)).to(args.device)
    if distributed.is_initialized():
        for weight in model.parameters():
            distributed.broadcast(weight.data, 0)
    if args.init:
        from training.model import load

        model.load_state_dict(load(args.init, args.device, torch.float32).state_dict())
    decay = [p for p in model.parameters() if p.ndim == 2]
    plain = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.98),
        fused=args.device == "cuda",
    )
    history_file = args.out / "history.json"
    history: list[dict[str, Any]] = json.loads(history_file.read_text()) if history_file.exists() else []
    newest = max(args.out.glob("*.pt"), key=lambda p: p.stat().st_mtime, default=None)
    if newest is not None and not args.init:
        saved = torch.load(newest, map_location=args.device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        print(f"going on after {newest.name}", flush=True)
    if not args.no_compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    torch._dynamo.config.cache_size_limit = 64
    done = {record["stage"] for record in history}
    for stage in args.stages:
        if stage.name in done:
            continue
        left = from_first(args.max_seconds - (time.monotonic() - begin) - 8, args.device)
        seconds = min(stage.seconds, left)
        if seconds < 10:
            print(f"no time left for stage {stage.name}", flush=True)
            break
        if args.rows:
            stage = replace(stage, parts=tuple(replace(part, rows=args.rows) for part in stage.parts))
        history.append(run_stage(model, optimizer, stage, source, args, seconds))
        if rank() > 0:
            continue
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out / f"{stage.name}.pt")
        save(model, args.out / "model")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            if (args.tokenizer / file).exists():
                shutil.copy(args.tokenizer / file, args.out / "model" / file)
        history_file.write_text(json.dumps(history, indent=1))
        print(json.dumps(history[-1]), flush=True)
        if stage.name == "copy" and history[-1]["token_accuracy"][0] < 0.5:
            sys.exit("copying was not learned; another seed or learning rate is needed")
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
    print(f"total {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
