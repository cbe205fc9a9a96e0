"""Flags of the needle command, checked and turned into a grid of cells.  Loads neither a model nor torch."""

from __future__ import annotations

import argparse
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval_attn.errors import ConfigError
from retrieval_attn.eval.needle.presets import PRESETS, Preset, preset_of
from retrieval_attn.eval.needle.text import ANSWER_TOKENS, MORE_ANSWER_TOKENS, Drawn, NeedleText

__all__ = ["Cell", "Options", "add_arguments"]

BUNDLED_MODEL = Path(__file__).parents[1] / "needle_model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the needle command; every hyphen may be written as an underscore."""
    parser.formatter_class = argparse.HelpFormatter  # the texts below name their defaults where that helps
    model = parser.add_argument_group("model")
    _flag(
        model,
        "--model",
        "--model-name",
        metavar="PATH|ID",
        help="model folder or hub id (default: bundled model)",
    )
    _flag(model, "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    _flag(
        model,
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="weights and cache; auto: float32 on the CPU, as stored elsewhere",
    )
    _flag(model, "--threads", type=int, metavar="N", help="CPU threads (default: all cores)")
    _flag(
        model,
        "--chat-template",
        default="auto",
        choices=["auto", "never"],
        help="auto: use the tokenizer's chat template if it has one",
    )

    grid = parser.add_argument_group("grid")
    _flag(
        grid,
        "--preset",
        metavar="FIGURE",
        help=f"lengths, depths, rounds, methods and budgets of the paper's {', '.join(PRESETS)}; other flags win",
    )
    _flag(
        grid,
        "--lengths",
        "--context-lengths",
        metavar="N,N",
        help='tokens, question and answer included: "4096,8k,128k" (default: 4096,8192,16384)',
    )
    _flag(grid, "--context-lengths-min", metavar="N", help="lengths as a range instead: first")
    _flag(grid, "--context-lengths-max", metavar="N", help="last")
    _flag(grid, "--context-lengths-num-intervals", type=int, metavar="N", help="how many (default: 35)")
    _flag(grid, "--depths", "--document-depth-percents", metavar="P,P", help="percent (default: 0,25,50,75,100)")
    _flag(grid, "--document-depth-percent-min", type=float, metavar="P", help="depths as a range instead: first")
    _flag(grid, "--document-depth-percent-max", type=float, metavar="P", help="last")
    _flag(grid, "--document-depth-percent-intervals", type=int, metavar="N", help="how many (default: 35)")
    _flag(
        grid,
        "--document-depth-percent-interval-type",
        choices=["linear", "sigmoid"],
        help="spacing of the range",
    )
    _flag(grid, "--rounds", type=int, metavar="N", help="contexts per cell, each with its own needle (default: 1)")
    _flag(grid, "--limit", type=int, metavar="N", help="only the first N cells")

    text = parser.add_argument_group("text")
    _flag(
        text,
        "--needle",
        action="append",
        metavar="TEXT",
        help="sentence to hide, repeatable; {city} is drawn for every cell, {number} for every needle",
    )
    _flag(
        text,
        "--needles",
        metavar="N",
        help="needles per context: the first at the cell's depth, the others evenly between it and the end; one"
        " question asks for all, the score is the share found (default: the number of --needle)",
    )
    _flag(text, "--question", "--retrieval-question", help="what to ask, with the same holes")
    _flag(
        text,
        "--answer",
        action="append",
        metavar="TEXT",
        help="expected in the answer, repeatable (default: {number} of the needle)",
    )
    _flag(
        text,
        "--haystack",
        "--haystack-dir",
        metavar="PATH",
        help="folder or file (.txt, .jsonl, .json) to hide it in (default: shipped prose)",
    )
    _flag(text, "--seed", type=int, default=42, help="of needles and shipped prose (default: %(default)s)")
    _flag(
        text,
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"room for the answer (default: {ANSWER_TOKENS}, and {MORE_ANSWER_TOKENS} for every further needle)",
    )
    _flag(
        text,
        "--context-length-buffer",
        "--final-context-length-buffer",
        type=int,
        default=0,
        metavar="N",
        help="tokens of every length to leave unused (default: %(default)s)",
    )

    methods = parser.add_argument_group("methods")
    _flag(
        methods,
        "--methods",
        metavar="NAME,NAME",
        help="methods to compare, or all; those of the ruler command (default: full,retrieval)",
    )
    _flag(
        methods,
        "--question-position",
        default="inside,after",
        help="inside: question read with the prompt; after: asked when the index is finished (default: both)",
    )
    _flag(
        methods,
        "--append",
        default="retrieval",
        choices=["retrieval", "exact"],
        help="how an after question attends to the context (default: %(default)s, the honest test)",
    )
    _flag(
        methods,
        "--budget",
        type=int,
        metavar="N",
        help="tokens attended per step and head, for every method but full (default: published parameters)",
    )
    _flag(methods, "--retrieve", metavar="K", help="keys retrieved per head: a number, a share or all")
    _flag(methods, "--sink", type=int, metavar="N", help="first tokens always attended to")
    _flag(methods, "--window", type=int, metavar="N", help="recent tokens always attended to")
    _flag(methods, "--index", metavar="NAME", help="index of the method retrieval (default: auto)")
    _flag(
        methods,
        "--method-option",
        action="append",
        metavar="METHOD.KEY=VALUE",
        help="option of one method, repeatable, such as quest.page=16",
    )

    output = parser.add_argument_group("output")
    _flag(
        output,
        "--output-dir",
        "--output-path",
        metavar="DIR",
        help="results folder; an unfinished one is continued (default: results/needle/MODEL-TIME)",
    )
    _flag(
        output,
        "--dry-run",
        action="store_true",
        help="show cells, token counts and a rough estimate; run nothing",
    )
    _flag(output, "--no-plot", action="store_true", help="no heatmap.png")
    _flag(
        output,
        "--save-contexts",
        action="store_true",
        help="write every prompt to contexts/ in the results folder",
    )
    _flag(output, "--score-only", metavar="DIR", help="score and plot a results folder again; needs no model")


@dataclass(frozen=True)
class Cell:
    """One place of the grid with what is hidden there."""

    length: int
    depth: float
    round: int
    drawn: Drawn

    @property
    def needle(self) -> str:
        """The first needle."""
        return self.drawn.needles[0]

    @property
    def question(self) -> str:
        return self.drawn.question

    @property
    def expected(self) -> tuple[str, ...]:
        return self.drawn.expected

    def row_id(self, method: str, position: str) -> str:
        return f"needle/{self.length}/{self.depth:g}/{self.round}/{method}/{position}"


@dataclass(frozen=True)
class Options:
    """The command's flags, checked.

    `retrieval` holds only what was given; the rest are Config's defaults.  `others`: options of the other methods,
    how they ask included.
    """

    model: str
    device: str
    dtype: str
    threads: int | None
    chat_template: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    rounds: int
    limit: int | None
    text: NeedleText
    haystack: Path | None
    seed: int
    max_new_tokens: int
    buffer: int
    methods: tuple[str, ...]
    positions: tuple[str, ...]
    append: str
    retrieval: dict[str, Any]
    others: dict[str, dict[str, Any]]
    output_dir: Path | None
    plot: bool
    save_contexts: bool

    @classmethod
    def of(cls, args: argparse.Namespace) -> Options:
        from retrieval_attn.eval.methods import METHODS, POSITIONS

        for name, least in (("rounds", 1), ("limit", 1), ("threads", 1), ("max_new_tokens", 1)):
            _at_least(name, getattr(args, name), least)
        _at_least("context_length_buffer", args.context_length_buffer, 0)
        preset = _fill_in(args)
        text = NeedleText.of(args.needle, args.needles, args.question, args.answer)
        methods = METHODS if args.methods == "all" else _choices("--methods", args.methods, METHODS)
        retrieval, others = _options_of_methods(args, methods, preset)
        return cls(
            model=args.model or str(BUNDLED_MODEL),
            device=args.device,
            dtype=args.dtype,
            threads=args.threads,
            chat_template=args.chat_template,
            lengths=_lengths(args),
            depths=_depths(args),
            rounds=args.rounds,
            limit=args.limit,
            text=text,
            haystack=Path(args.haystack) if args.haystack else None,
            seed=args.seed,
            max_new_tokens=args.max_new_tokens or text.answer_tokens,
            buffer=args.context_length_buffer,
            methods=methods,
            positions=_choices("--question-position", args.question_position, POSITIONS),
            append=args.append,
            retrieval=retrieval,
            others=others,
            output_dir=Path(args.output_dir).expanduser() if args.output_dir else None,
            plot=not args.no_plot,
            save_contexts=args.save_contexts,
        )

    @property
    def given(self) -> dict[str, dict[str, Any]]:
        """`others` without the one value of --append, which is a setting of its own."""
        return {
            name: {k: v for k, v in own.items() if (k, v) != ("append", self.append)}
            for name, own in self.others.items()
        }

    @property
    def model_name(self) -> str:
        path = Path(self.model)
        return path.resolve().name if path.exists() else self.model

    def cells(self) -> list[Cell]:
        """The grid in the order it is run.  A cell's needles depend on the seed and its place only."""
        cells = []
        for length in self.lengths:
            for depth in self.depths:
                for turn in range(self.rounds):
                    rng = random.Random(f"needle/{self.seed}/{length}/{depth:g}/{turn}")
                    cells.append(Cell(length, depth, turn, self.text.draw(rng)))
        return cells[: self.limit]


def _fill_in(args: argparse.Namespace) -> Preset | None:
    """Give what a preset (or nothing) says for the flags that were left out.  Returns the preset."""
    preset = preset_of(args.preset) if args.preset else None
    if preset is not None:
        ranges = [getattr(args, f"{name}_{end}") for name, ends in _RANGES.items() for end in ends]
        if all(value is None for value in ranges[:3]):
            args.lengths = preset.lengths if args.lengths is None else args.lengths
        if all(value is None for value in ranges[3:]):
            args.depths = preset.depths if args.depths is None else args.depths
    if args.methods is None:
        args.methods = preset.methods if preset else "full,retrieval"
    if args.rounds is None:
        args.rounds = preset.rounds if preset else 1
    return preset


_RANGES = {
    "context_lengths": ("min", "max", "num_intervals"),
    "document_depth_percent": ("min", "max", "intervals", "interval_type"),
}


def _options_of_methods(
    args: argparse.Namespace, methods: Sequence[str], preset: Preset | None
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Options of Config for the method retrieval, and those of the other methods by name."""
    from retrieval_attn.eval.baselines import budget_options, option_names
    from retrieval_attn.eval.suite.answerers import check_options, options_of, parse_method_options

    shared: dict[str, Any] = {k: getattr(args, k) for k in ("sink", "window", "budget", "threads")}
    shared["retrieve"] = None if args.retrieve is None else _retrieve(args.retrieve)
    given: dict[str, dict[str, Any]] = {"all": {k: v for k, v in shared.items() if v is not None}}
    for name, own in parse_method_options((*(preset.method_options if preset else ()), *(args.method_option or ()))):
        given.setdefault(name, {}).update(own)
    if args.index is not None:
        given.setdefault("retrieval", {})["index"] = args.index
    unused = {k: v for k, v in given["all"].items() if k != "threads"}  # of the process too
    check_options(methods, {**given, "all": unused})
    retrieval = options_of("retrieval", given)
    budget = retrieval.pop("budget", None)
    if budget is not None:
        retrieval = {**budget_options("retrieval", budget, retrieval), **retrieval}
    asking: dict[str, Any] = {k: retrieval.pop(k) for k in ("append", "inside") if k in retrieval}  # not Config's
    others: dict[str, dict[str, Any]] = {"retrieval": asking} if asking else {}
    for name in methods:
        if name not in ("full", "retrieval"):
            append = {"append": args.append} if "append" in option_names(name) else {}
            others[name] = {**append, **options_of(name, given)}
    return retrieval, others


def _flag(group: Any, *names: str, **options: Any) -> None:
    """Add a flag; its other names and underscore spellings work too but stay out of the help."""
    action = group.add_argument(names[0], dest=names[0][2:].replace("-", "_"), **options)
    spelled = {n for name in names for n in (name, "--" + name[2:].replace("-", "_"))} - {names[0]}
    if spelled:
        hidden = {**options, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        group.add_argument(*sorted(spelled), dest=action.dest, **hidden)


def _length(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([kKmM]?)", text.strip())
    if not match or int(match.group(1)) == 0:
        raise ConfigError(f"length {text!r} is not a number of tokens; write 4096, 4k or 1m")
    return int(match.group(1)) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match.group(2).lower()]


def _retrieve(text: str) -> int | float | str:
    if text == "all":
        return text
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        raise ConfigError(
            f"--retrieve {text!r} is no number of keys; write 100, a share such as 0.01, or all"
        ) from None


def _lengths(args: argparse.Namespace) -> tuple[int, ...]:
    ends = (args.context_lengths_min, args.context_lengths_max)
    given = (*(None if e is None else _length(e) for e in ends), args.context_lengths_num_intervals)
    if args.lengths is not None and any(v is not None for v in given):
        raise ConfigError(
            "--lengths and --context-lengths-min/-max/-num-intervals exclude each other; give one of them"
        )
    if any(v is not None for v in given):
        values = _spaced("context-lengths", given, (1000, 16000, 35))
        return tuple(dict.fromkeys(round(v) for v in values))
    parts = [p for p in (args.lengths or "4096,8192,16384").strip("[] ").split(",") if p.strip()]
    if not parts:
        raise ConfigError(f"--lengths {args.lengths!r} holds no length; write 4096,8192")
    return tuple(dict.fromkeys(_length(p) for p in parts))


def _depths(args: argparse.Namespace) -> tuple[float, ...]:
    prefix = "document_depth_percent_"
    given = tuple(getattr(args, prefix + name) for name in ("min", "max", "intervals"))
    kind = args.document_depth_percent_interval_type
    ranged = any(v is not None for v in given) or kind is not None
    if args.depths is not None and ranged:
        raise ConfigError(
            "--depths and --document-depth-percent-min/-max/-intervals exclude each other; give one of them"
        )
    if ranged:
        depths = [float(v) for v in _spaced("document-depth-percent", given, (0.0, 100.0, 35))]
        depths = [_sigmoid(d) for d in depths] if kind == "sigmoid" else [float(round(d)) for d in depths]
    else:
        try:
            depths = [float(p) for p in (args.depths or "0,25,50,75,100").strip("[] ").split(",") if p.strip()]
        except ValueError:
            raise ConfigError(f"--depths {args.depths!r} is no list of percents; write 0,50,100") from None
    if not depths or not all(0.0 <= d <= 100.0 for d in depths):
        raise ConfigError(f"--depths must be percents from 0 to 100, got {depths}; write 0,50,100")
    return tuple(dict.fromkeys(depths))


def _spaced(name: str, given: Sequence[Any], defaults: Sequence[Any]) -> list[float]:
    """Evenly spaced values from least to most, both included."""
    least, most, count = (d if g is None else g for g, d in zip(given, defaults, strict=True))
    if count < 1 or most < least:
        raise ConfigError(f"--{name}: needed min <= max and at least one interval, got {least}, {most} and {count}")
    return [float(least)] if count == 1 else [least + (most - least) * i / (count - 1) for i in range(count)]


def _sigmoid(depth: float) -> float:
    """Spacing that is dense at both ends; 0 and 100 stay where they are."""
    return depth if depth in (0.0, 100.0) else round(100.0 / (1.0 + math.exp(-0.1 * (depth - 50.0))), 3)


def _choices(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Comma-separated names, in the order of `known` (the baseline first)."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(
            f"{flag} {text!r}: {unknown[0] if unknown else 'nothing'!r} is unknown; choose from {', '.join(known)}"
        )
    return tuple(name for name in known if name in names)


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}; give a larger number")
