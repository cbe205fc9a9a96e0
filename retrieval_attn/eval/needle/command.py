"""`retrieval-attn needle`: sentences hidden in a long text, asked for at every length and depth.

Compares full attention with retrieval attention, or any other method, on the same token ids, cell by cell, and writes
a results folder that an interrupted run continues.  The test follows the published needle-in-a-haystack grid; the
needle changes from cell to cell, so that an answer cannot be remembered, and scoring looks for it in the output only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrieval_attn.errors import ConfigError, ContextLengthError, InputDataError
from retrieval_attn.eval.needle.options import Cell, Options, add_arguments
from retrieval_attn.eval.needle.text import depths_of

__all__ = ["add_arguments", "run"]

GENERATOR = "needle/1"  # part of the fingerprint: raise it when the same settings give other prompts


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 if every cell was answered, 1 if some failed.  Raises RetrievalAttentionError."""
    if args.score_only:
        return _score_only(args)
    options = Options.of(args)
    test = Test.prepare(options)
    if args.dry_run:
        print(test.overview())
        return 0
    return _run_cells(test)


class Test:
    """A needle test ready to run: tokenizer, haystack and cells, every bad input found; no weights loaded."""

    __test__ = False  # not a test class for pytest

    def __init__(self, options: Options, model_config: Any, form: Any, haystack: Any, config: Any) -> None:
        self.options, self.model_config, self.form = options, model_config, form
        self.haystack, self.config = haystack, config
        self.cells = options.cells()
        self.notes: list[str] = []

    @classmethod
    def prepare(cls, options: Options) -> Test:
        """Load the tokenizer and the text, check everything.  Raises RetrievalAttentionError; writes nothing."""
        from retrieval_attn.eval.prompts import PromptFormat
        from retrieval_attn.eval.text.haystack import Haystack, read_haystack, shipped_prose

        config = None
        if "retrieval" in options.methods:
            import retrieval_attn as ra

            config = ra.Config(**options.retrieval)
        model_config, tokenizer = _load_description(options.model)
        positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
        longest = max(options.lengths)
        if positions is not None and longest > positions:
            raise ContextLengthError(
                f"--lengths {longest} needs {longest} positions, the model {options.model_name} has {positions};"
                f" give lengths up to {positions}"
            )
        form = PromptFormat.of(tokenizer, options.chat_template)
        text = (
            shipped_prose(longest * 7 + 2000, options.seed)
            if options.haystack is None
            else read_haystack(options.haystack)
        )
        test = cls(options, model_config, form, Haystack(text, tokenizer, longest), config)
        test._check_cells()
        return test

    def _check_cells(self) -> None:
        for cell in self.cells:
            room = self._room(cell)
            around = self._around(cell)
            needed = room + around + 16
            if cell.length < needed:
                raise ConfigError(
                    f"length {cell.length} is too short: needle {room}, question and template"
                    f" {around - self.options.max_new_tokens - self.options.buffer},"
                    f" answer {self.options.max_new_tokens},"
                    f" buffer {self.options.buffer} and some haystack need {needed} tokens; give longer --lengths"
                )
        if self.haystack.passes > 1:
            self.notes.append(
                f"the haystack is shorter than the longest context and is repeated {self.haystack.passes} times"
            )
        folded = self.haystack.text.casefold()
        known = [e for c in self.cells for e in c.expected if e.casefold() in folded]
        if known:
            self.notes.append(f"the haystack itself holds the expected answer ({known[0]!r}); scores will be too high")

    def _around(self, cell: Cell) -> int:
        """Tokens of a length that are neither haystack nor needle."""
        question = self.form.question_ids(cell.question)
        return len(self.form.head) + len(question) + self.options.max_new_tokens + self.options.buffer

    def _room(self, cell: Cell) -> int:
        """Most tokens that the needles take."""
        return sum(self.haystack.needle_room(needle) for needle in cell.drawn.needles)

    def prompt(self, cell: Cell) -> tuple[Any, Any]:
        """The cell's Prompt, and where its needles lie (Placed)."""
        needles = cell.drawn.needles
        budget = cell.length - self._around(cell) - self._room(cell)
        span = self.haystack.excerpt(budget, cell.length // 200, cell.round)
        placed = self.haystack.place_all(needles, depths_of(cell.depth, len(needles)), span)
        prompt = self.form.prompt(placed.ids, cell.question)
        assert len(prompt) + self.options.max_new_tokens + self.options.buffer <= cell.length, cell
        return prompt, placed

    def settings(self) -> dict[str, Any]:
        """What decides the meaning of a row; the grid is not part of it, so that a folder can grow."""
        from retrieval_attn.eval.methods import model_digest
        from retrieval_attn.model.loading import choose_device

        options, text = self.options, self.options.text
        retrieval = {k: v for k, v in (self.config.to_dict() if self.config else {}).items() if k != "threads"}
        others = {m: {k: v for k, v in own.items() if k != "threads"} for m, own in options.given.items()}
        others = {m: own for m, own in others.items() if own}
        return {
            "generator": GENERATOR,
            "model": options.model_name,
            "model_digest": model_digest(options.model) or getattr(self.model_config, "_commit_hash", None),
            "device": str(choose_device(options.device)),
            "dtype": options.dtype,
            "chat_template": options.chat_template,
            "needle": text.needles[0] if len(text.needles) == 1 else list(text.needles),
            "question": text.question,
            "answers": list(text.answers),
            "haystack": "shipped prose" if options.haystack is None else self.haystack.digest,
            "seed": options.seed,
            "max_new_tokens": options.max_new_tokens,
            "context_length_buffer": options.buffer,
            "append": options.append,
            "retrieval": retrieval,
            **({"options": others} if others else {}),
        }

    def overview(self) -> str:
        """Cells, token counts and a rough estimate."""
        from retrieval_attn.eval.needle.heatmap import length_label

        options = self.options
        lines = [
            f"model {options.model_name}, methods {', '.join(options.methods)}, {len(self.cells)} cells, "
            f"{len(self.cells) * len(options.methods) * len(options.positions)} answers"
        ]
        lines.append("   length   depth   prompt tokens   fill    depth reached")
        for cell in self.cells:
            prompt, placed = self.prompt(cell)
            used = len(prompt) + options.max_new_tokens + options.buffer
            lines.append(
                f"{cell.length:9d}{cell.depth:7g}%{len(prompt):16d}{used / cell.length:7.1%}{placed.depth:15.1f}%"
            )
        lines += [f"note: {note}" for note in self.notes]
        kv, flops = _costs(self.model_config, max(c.length for c in self.cells), [c.length for c in self.cells])
        lines.append(f"keys and values at {length_label(max(c.length for c in self.cells))}: {_bytes(kv)} per context")
        passes = len(options.methods)
        lines.append(f"prefill work: {flops * passes / 1e12:.1f} TFLOP ({_minutes(flops * passes, options.device)})")
        return "\n".join(lines)


def _run_cells(test: Test) -> int:
    from retrieval_attn.eval.ranks import one_writer

    with one_writer(test.options.output_dir or _new_folder(test.options.model_name)) as folder:
        return _run_cells_into(folder, test)


def _run_cells_into(folder: Path, test: Test) -> int:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from retrieval_attn.eval import methods as ways
    from retrieval_attn.eval.runs import RunFolder, environment

    options = test.options
    if options.plot:
        _need_matplotlib()
    settings = test.settings()
    RunFolder.check(folder, settings)
    if options.threads:
        torch.set_num_threads(options.threads)
    disable_progress_bar()  # one bar, over the cells, is enough
    model = ways.load_model(options.model, options.device, options.dtype)
    answerers = ways.build_methods(
        options.methods, model, test.form.tokenizer, test.config, options.append, options.others
    )
    start = {**environment(), "torch_threads": torch.get_num_threads(), "dtype": str(model.dtype)}
    if model.device.type == "cuda":
        start["gpu"] = torch.cuda.get_device_name(model.device)
    for note in test.notes:
        print(f"note: {note}", file=sys.stderr)
    with RunFolder.open(folder, settings, start=start) as out:
        wanted = [(c, m) for c in test.cells for m in answerers]
        ids = {c.row_id(m, p) for c, m in wanted for p in options.positions}
        try:
            _fill(out, test, answerers, wanted, ids)
        except KeyboardInterrupt:
            print(f"interrupted; continue with the same flags and --output-dir {folder}", file=sys.stderr)
            raise
        rows = list(out.rows.values())
        print(_report(folder, rows, settings, options.plot))
    return 1 if any(row.get("error") for row in rows if row["id"] in ids) else 0


def _fill(out: Any, test: Test, answerers: dict[str, Any], wanted: list[tuple[Cell, str]], ids: set[str]) -> None:
    """Run what has no row yet, one cell and method after the other, behind a progress bar."""
    from tqdm import tqdm

    todo = set(out.missing(ids))
    done = len(ids) - len(todo)
    if done:
        print(f"continuing {out.path}: {done} of {len(ids)} answers are there already", file=sys.stderr)
    scores: dict[str, list[float]] = {}
    work = [(c, m, [p for p in test.options.positions if c.row_id(m, p) in todo]) for c, m in wanted]
    work = [item for item in work if item[2]]
    last_of = {cell: name for cell, name, _ in work}
    # the bar counts work, not answers: attention's share grows with the square of the length, and so does the time
    cost = {c.length: c.length * (c.length + 16384) for c in test.cells}
    with tqdm(
        total=sum(cost[c.length] for c, _, _ in work),
        bar_format="{percentage:3.0f}%|{bar:20}| {desc}{postfix} [{elapsed}<{remaining}]",
        mininterval=0.1 if sys.stderr.isatty() else 10,
        disable=not work,
    ) as bar:
        for cell, name, positions in work:
            tally = "".join(f", {m} {sum(s) / len(s):.2f}" for m, s in scores.items())
            bar.set_description_str(f"{done}/{len(ids)}{tally}; now {cell.length} at {cell.depth:g}%, {name}", False)
            rows = _answer(test, cell, answerers[name], positions, out.path)
            out.append(*rows)
            scores.setdefault(name, []).extend(row["score"] for row in rows)
            done += len(rows)
            bar.update(cost[cell.length])
            if last_of[cell] == name:  # the next context shares nothing with this one
                for method in answerers.values():
                    method.release()


def _answer(test: Test, cell: Cell, method: Any, positions: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Rows of one cell and method.  What goes wrong inside the method becomes rows with an error."""
    from retrieval_attn.eval.needle.report import score
    from retrieval_attn.eval.runs import utc_now
    from retrieval_attn.model.loading import launched_processes

    options = test.options
    prompt, placed = test.prompt(cell)
    if options.save_contexts:
        _save_context(folder, cell, test.form.tokenizer, prompt)
    several = {}
    if len(cell.drawn.needles) > 1:
        several = {"needles": list(cell.drawn.needles), "achieved_depths": [round(d, 3) for d in placed.depths]}
    begin = time.perf_counter()
    error, replies = None, {}
    try:
        replies = method.answers(prompt, positions, options.max_new_tokens)
    except Exception as problem:  # one cell must not end a run of hours: kept in its rows, counted, tried again
        if launched_processes() > 1:  # but the other processes may be waiting for this one in the middle of the cell
            raise
        error = f"{type(problem).__name__}: {problem}"
        method.release()  # what it holds may be what went wrong
    rows = []
    for position in positions:
        reply = replies.get(position)
        text = reply.text if reply else ""
        rows.append(
            {
                "id": cell.row_id(method.name, position),
                "model": options.model_name,
                "method": method.name,
                "position": position,
                "length": cell.length,
                "achieved_length": len(prompt) + options.max_new_tokens + options.buffer,
                "prompt_tokens": len(prompt),
                "depth": cell.depth,
                "achieved_depth": round(placed.depth, 3),
                "needle_token": placed.needle_start + len(test.form.head),
                "round": cell.round,
                "seed": options.seed,
                "needle": cell.needle,
                **several,
                "question": cell.question,
                "expected": list(cell.expected),
                "response": text,
                "output_tokens": len(reply.ids) if reply else 0,
                "finish_reason": reply.finish_reason if reply else None,
                "score": score(cell.expected, text),
                "seconds": {k: round(v, 4) for k, v in reply.seconds.items()}
                if reply
                else {"total": round(time.perf_counter() - begin, 4)},
                "retrieval": reply.stats if reply else {},
                "timestamp_utc": utc_now(),
                "error": error,
            }
        )
    return rows


def _report(folder: Path, rows: list[dict[str, Any]], settings: dict[str, Any], plot: bool) -> str:
    from retrieval_attn.eval.needle.report import report

    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = max(shutil.get_terminal_size((120, 24)).columns, 60)
    text = report(folder, rows, title=_title(settings), plot=plot, color=color, width=width)
    files = "heatmap.png, " if plot and (folder / "heatmap.png").exists() else ""
    return f"\n{text}\n\n{folder}: {files}predictions.jsonl, summary.json, summary.csv, config.json, env.json"


def _title(settings: dict[str, Any]) -> str:
    ours = settings.get("retrieval") or {}
    parts = (
        [f"retrieve {ours['retrieve']}, sink {ours['sink']}, window {ours['window']}, index {ours['index']}"]
        if ours
        else []
    )
    return "; ".join([f"Needle in a haystack: {settings['model']}", *parts])


def _score_only(args: argparse.Namespace) -> int:
    from retrieval_attn.eval.needle.report import score
    from retrieval_attn.eval.runs import load_run

    folder = Path(args.score_only).expanduser()
    config, rows = load_run(folder)
    if not rows:
        raise InputDataError(f"{folder}: needed at least one row in predictions.jsonl, found none; run the test first")
    if not args.no_plot:
        _need_matplotlib()
    for row in rows:
        if not row.get("error"):
            row["score"] = score(row["expected"], row["response"])
    print(_report(folder, rows, config["settings"], not args.no_plot))
    return 1 if any(row.get("error") for row in rows) else 0


def _load_description(model: str) -> tuple[Any, Any]:
    """Config and tokenizer of a model, without its weights."""
    from transformers import AutoConfig, AutoTokenizer

    from retrieval_attn.model.loading import load

    looks_local = model.startswith((".", "/", "~")) or Path(model).exists() or model.count("/") > 1
    path = Path(model).expanduser()
    if looks_local and not (path / "config.json").is_file():
        raise InputDataError(f"model {model}: needed a folder with a config.json, found none; check the path")
    return load(AutoConfig, path), load(AutoTokenizer, path)


def _need_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError(
            'heatmap.png needs matplotlib, which is not installed; install "retrieval-attn[eval]" or use --no-plot'
        )


def _new_folder(model: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-")
    return Path("results") / "needle" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _save_context(folder: Path, cell: Cell, tokenizer: Any, prompt: Any) -> None:
    from retrieval_attn.eval.runs import write_atomically

    target = folder / "contexts"
    target.mkdir(exist_ok=True)
    name = f"{cell.length}_{cell.depth:g}_{cell.round}"
    write_atomically(target / f"{name}.txt", tokenizer.decode(prompt.ids.tolist()))
    write_atomically(target / f"{name}.json", json.dumps({"ids": prompt.ids.tolist()}))


def _costs(config: Any, longest: int, lengths: Sequence[int]) -> tuple[float, float]:
    """Bytes of keys and values of the longest context (2 bytes per number), and operations of one prefill of each."""
    c = config.get_text_config()
    layers, hidden, heads = c.num_hidden_layers, c.hidden_size, c.num_attention_heads
    kv_heads = getattr(c, "num_key_value_heads", None) or heads
    head_dim = getattr(c, "head_dim", None) or hidden // heads
    inner = getattr(c, "intermediate_size", None) or 4 * hidden
    weights = layers * (hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner)
    work = sum(2 * weights * n + 2 * layers * heads * head_dim * n * n for n in lengths)
    return 2 * 2 * layers * kv_heads * head_dim * longest, float(work)


def _minutes(flops: float, device: str) -> str:
    """A rough time: the CPU's speed is measured on one product of matrices, a GPU's assumed."""
    if device.startswith("cuda"):
        return f"about {flops / 2e14 / 60:.1f} minutes at an assumed 200 TFLOP/s"
    import numpy as np

    a = np.ones((1024, 1024), dtype=np.float32)
    _ = a @ a
    begin = time.perf_counter()
    _ = a @ a @ a @ a
    speed = 3 * 2 * 1024**3 / (time.perf_counter() - begin)
    return f"about {flops / speed / 60 * 1.3:.1f} minutes on this CPU"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError(count)
