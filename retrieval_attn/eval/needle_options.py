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

__all__ = ["Cell", "Options", "add_arguments"]

BUNDLED_MODEL = Path(__file__).parent / "needle_model"
NEEDLE = "The special magic {city} number is: {number}."
QUESTION = "What is the special magic {city} number?"
_HOLES = re.compile(r"\{([A-Za-z_]+)\}")


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
    _flag(grid, "--rounds", type=int, default=1, metavar="N", help="needles per cell (default: %(default)s)")
    _flag(grid, "--limit", type=int, metavar="N", help="only the first N cells")

    text = parser.add_argument_group("text")
    _flag(
        text,
        "--needle",
        default=NEEDLE,
        help="sentence to hide; {city} and {number} are drawn for every cell",
    )
    _flag(text, "--question", "--retrieval-question", default=QUESTION, help="what to ask, with the same holes")
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
        default=32,
        metavar="N",
        help="room for the answer (default: %(default)s)",
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
    _flag(methods, "--methods", default="full,retrieval", help="full, retrieval or both (default: %(default)s)")
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
    _flag(methods, "--top-k", metavar="K", help="keys retrieved per head: a number, a share or all")
    _flag(methods, "--sink", type=int, metavar="N", help="first tokens always attended to")
    _flag(methods, "--window", type=int, metavar="N", help="recent tokens always attended to")
    _flag(methods, "--index", metavar="NAME", help="index over the keys (default: auto)")

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
    needle: str
    question: str
    expected: tuple[str, ...]

    def row_id(self, method: str, position: str) -> str:
        return f"needle/{self.length}/{self.depth:g}/{self.round}/{method}/{position}"


@dataclass(frozen=True)
class Options:
    """The command's flags, checked.  `retrieval` holds only what was given; the rest are Config's defaults."""

    model: str
    device: str
    dtype: str
    threads: int | None
    chat_template: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    rounds: int
    limit: int | None
    needle: str
    question: str
    answers: tuple[str, ...]
    haystack: Path | None
    seed: int
    max_new_tokens: int
    buffer: int
    methods: tuple[str, ...]
    positions: tuple[str, ...]
    append: str
    retrieval: dict[str, Any]
    output_dir: Path | None
    plot: bool
    save_contexts: bool

    @classmethod
    def of(cls, args: argparse.Namespace) -> Options:
        from retrieval_attn.eval.methods import METHODS, POSITIONS

        for name, least in (("rounds", 1), ("limit", 1), ("threads", 1), ("max_new_tokens", 1)):
            _at_least(name, getattr(args, name), least)
        _at_least("context_length_buffer", args.context_length_buffer, 0)
        needle = args.needle.replace("\\n", "\n")
        answers = tuple(args.answer or (("{number}",) if "{number}" in needle else ()))
        if not needle.strip():
            raise ConfigError("--needle must hold a sentence, got an empty one; leave the flag out for the default")
        if not args.question.strip():
            raise ConfigError("--question must hold a question, got an empty one; leave the flag out for the default")
        if not answers or not all(a.strip() for a in answers):
            raise ConfigError("--needle without {number} needs --answer TEXT, the string expected in the answer")
        for text in (needle, args.question, *answers):
            unknown = [hole for hole in _HOLES.findall(text) if hole not in ("city", "number")]
            if unknown:
                raise ConfigError(f"{text!r}: unknown hole {{{unknown[0]}}}; the holes are {{city}} and {{number}}")
        retrieval = {k: getattr(args, k) for k in ("sink", "window", "index", "threads")}
        retrieval["top_k"] = None if args.top_k is None else _top_k(args.top_k)
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
            needle=needle,
            question=args.question,
            answers=answers,
            haystack=Path(args.haystack) if args.haystack else None,
            seed=args.seed,
            max_new_tokens=args.max_new_tokens,
            buffer=args.context_length_buffer,
            methods=_choices("--methods", args.methods, METHODS),
            positions=_choices("--question-position", args.question_position, POSITIONS),
            append=args.append,
            retrieval={k: v for k, v in retrieval.items() if v is not None},
            output_dir=Path(args.output_dir).expanduser() if args.output_dir else None,
            plot=not args.no_plot,
            save_contexts=args.save_contexts,
        )

    @property
    def model_name(self) -> str:
        path = Path(self.model)
        return path.resolve().name if path.exists() else self.model

    def cells(self) -> list[Cell]:
        """The grid in the order it is run.  A cell's needle depends on the seed and its place only."""
        from retrieval_attn.eval.words import CITIES

        cells = []
        for length in self.lengths:
            for depth in self.depths:
                for turn in range(self.rounds):
                    rng = random.Random(f"needle/{self.seed}/{length}/{depth:g}/{turn}")
                    holes = {"city": rng.choice(CITIES), "number": str(rng.randint(1_000_000, 9_999_999))}

                    def fill(text: str, holes: dict[str, str] = holes) -> str:
                        return _HOLES.sub(lambda m: holes[m.group(1)], text)

                    expected = tuple(fill(a) for a in self.answers)
                    cells.append(Cell(length, depth, turn, fill(self.needle), fill(self.question), expected))
        return cells[: self.limit]


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


def _top_k(text: str) -> int | float | str:
    if text == "all":
        return text
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        raise ConfigError(f"--top-k {text!r} is no number of keys; write 100, a share such as 0.01, or all") from None


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
