"""Train the bundled retrieval model from nothing, short contexts first, on one GPU.

Every stage writes OUT/<stage>.pt (weights and optimizer) and OUT/model (Hugging Face folder, bf16); a later
call goes on after the last finished stage, so the whole run may be cut into several commands:

    python training/train.py --out OUT --filler DIR
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from training.data import KINDS, MIXTURES, Batches, Source  # noqa: E402
from training.model import Shape, TinyLlama, save  # noqa: E402

MICRO_TOKENS = 262_144


@dataclass(frozen=True)
class Stage:
    """length tokens x rows per step; ends after `steps` or `seconds`, with the learning rate at 5 %."""

    name: str
    length: int
    rows: int
    steps: int
    seconds: float
    lr: float
    asks: int
    stretch: float
    repeat: float = 0.3  # mixture weight of plain copying
    mixture: str = "base"


STAGES = (
    Stage("copy", 256, 1024, 1200, 75, 2e-3, 2, 0.0, 40.0),
    Stage("512", 512, 512, 1500, 110, 2e-3, 4, 0.3, 2.0),
    Stage("2048", 2048, 128, 900, 80, 1.5e-3, 10, 0.5),
    Stage("8192", 8192, 32, 700, 100, 1.2e-3, 24, 0.5),
    Stage("8192b", 8192, 32, 900, 120, 1.5e-3, 12, 0.5),
    Stage("32768", 32768, 8, 400, 110, 1e-3, 32, 0.5),
    Stage("131072a", 131072, 4, 200, 240, 5e-4, 64, 0.0),
    Stage("2048b", 2048, 128, 2000, 110, 1.5e-3, 8, 0.5),
    Stage("8192c", 8192, 32, 700, 70, 1e-3, 12, 0.5),
    Stage("32768b", 32768, 8, 400, 70, 8e-4, 16, 0.5),
    Stage("131072b", 131072, 4, 200, 200, 5e-4, 32, 0.0),
    # high rates at short lengths only: at 32,768 a rate of 8e-4 undid what 2,048 had learned of lists
    Stage("2048c", 2048, 128, 2500, 140, 1e-3, 8, 0.5, 0.2, "lists"),
    Stage("8192d", 8192, 32, 900, 75, 5e-4, 12, 0.5, 0.2, "lists"),
    Stage("32768c", 32768, 8, 400, 85, 3e-4, 20, 0.5, 0.1, "long"),
    Stage("131072c", 131072, 4, 200, 230, 4e-4, 40, 0.0, 0.1, "long"),
)


def parse_stage(text: str) -> Stage:
    """Stage name, or name:seconds, or name:seconds:lr."""
    name, *rest = text.split(":")
    found = next((stage for stage in STAGES if stage.name == name), None)
    if found is None:
        raise argparse.ArgumentTypeError(f"stage {name!r} is unknown; choose from {[s.name for s in STAGES]}")
    values = dict(vars(found))
    values.update(zip(("seconds", "lr"), map(float, rest), strict=False))
    return Stage(**values)


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
        rates = (self.right / self.asked.clamp(min=1)).tolist()
        seen = self.asked.tolist()
        self.accuracy = 1 - float(self.tokens[0] / self.tokens[1].clamp(min=1))
        self.tokens.zero_()
        self.asked.zero_()
        self.right.zero_()
        return [rate if n else math.nan for rate, n in zip(rates, seen, strict=True)]


def micro_loss(model: TinyLlama, batch: dict[str, Tensor], tally: Tally) -> Tensor:
    """Mean answer-token loss (first two tokens of an answer count twice) + 0.1 x loss on 4,096 positions.

    A row counts by the square root of its answer tokens, so that one list is not lost beside forty UUIDs.
    """
    ids, weights = batch["ids"], batch["weights"][:, 1:]
    states = model.hidden(ids, batch["positions"])[:, :-1]
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
        model.logits(states.reshape(-1, states.shape[-1])[flat]).float(),
        targets.reshape(-1)[flat],
        ignore_index=2,
    )
    return answer + 0.1 * text


def run_stage(
    model: TinyLlama,
    optimizer: torch.optim.Optimizer,
    stage: Stage,
    source: Source,
    args: argparse.Namespace,
    seconds: float,
) -> dict[str, object]:
    """Train one stage in place; returns its record (seconds, steps, exact-match rate per kind)."""
    device = args.device
    backend = choose_attention(stage.length, device)
    micro_rows = max(1, min(stage.rows, MICRO_TOKENS // stage.length))
    micro = max(1, stage.rows // micro_rows)
    base = [*MIXTURES[stage.mixture][:-1], stage.repeat]
    weights = multiprocessing.Array("d", base)
    batches = Batches(source, stage.length, micro_rows, stage.asks, stage.stretch, args.seed, weights)
    loader = iter(
        DataLoader(batches, batch_size=None, num_workers=args.workers, prefetch_factor=2 if args.workers else None)
    )
    tally = Tally(device)
    start = last = time.monotonic()
    waited, step, rates = 0.0, 0, [math.nan] * len(KINDS)
    while True:
        progress = max(step / stage.steps, (time.monotonic() - start) / seconds)
        if progress >= 1:
            break
        ramp = 200 if stage.name == "copy" else 10 if stage.length == 131072 else 20
        warm = min(1.0, (step + 1) / ramp)
        for group in optimizer.param_groups:
            group["lr"] = stage.lr * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        for _ in range(micro):
            asked = time.monotonic()
            batch = {name: t.to(device, non_blocking=True) for name, t in next(loader).items()}
            waited += time.monotonic() - asked
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = micro_loss(model, batch, tally) / micro
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        now = time.monotonic()
        if now - last > args.log_seconds:
            fresh = tally.read()
            rates = [new if not math.isnan(new) else old for new, old in zip(fresh, rates, strict=True)]
            with weights.get_lock():
                for i, rate in enumerate(rates):
                    error = 0.3 if math.isnan(rate) else 1 - rate
                    weights[i] = base[i] * (0.3 + min(2 * error, 0.7))
            shown = " ".join(f"{k}={100 * r:.0f}" for k, r in zip(KINDS, rates, strict=True))
            speed = step * stage.rows * stage.length / (now - start) / 1e6
            print(
                f"[{stage.name}] {now - start:.0f}s step {step} acc {tally.accuracy:.3f}"
                f" loss {float(loss.detach()) * micro:.3f} {speed:.2f}Mtok/s"
                f" wait {waited:.0f}s | {shown}",
                flush=True,
            )
            last = now
            if stage.name == "copy" and tally.accuracy > 0.97:
                break
    del loader
    record = {
        "stage": stage.name,
        "seconds": time.monotonic() - start,
        "steps": step,
        "rows": stage.rows,
        "lr": stage.lr,
        "attention": backend,
        "exact_match": dict(zip(KINDS, tally.read(), strict=True)),
        "last_window": rates,
        "token_accuracy": tally.accuracy,
    }
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the model")
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("retrieval_attn/eval/needle_model"), help="tokenizer folder"
    )
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

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    source = Source(AutoTokenizer.from_pretrained(args.tokenizer), args.filler)
    print(f"data ready after {time.monotonic() - begin:.1f} s", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    model = TinyLlama(Shape(num_hidden_layers=args.layers)).to(args.device)
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
    history = json.loads(history_file.read_text()) if history_file.exists() else []
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
        seconds = min(stage.seconds, args.max_seconds - (time.monotonic() - begin) - 8)
        if seconds < 10:
            print(f"no time left for stage {stage.name}", flush=True)
            break
        if args.rows:
            stage = Stage(**{**vars(stage), "rows": args.rows})
        history.append(run_stage(model, optimizer, stage, source, args, seconds))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out / f"{stage.name}.pt")
        save(model, args.out / "model")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            if (args.tokenizer / file).exists():
                shutil.copy(args.tokenizer / file, args.out / "model" / file)
        history_file.write_text(json.dumps(history, indent=1))
        print(json.dumps(history[-1]), flush=True)
        if stage.name == "copy" and float(str(history[-1]["token_accuracy"])) < 0.5:
            sys.exit("copying was not learned; another seed or learning rate is needed")
    print(f"total {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
