"""What is run for each table and figure: commands of this package, scaled down unless asked for the paper's size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from retrieval_attn_eval.flags import parse_lengths
from retrieval_attn_eval.infinitebench.catalogue import PAPER_TASKS
from retrieval_attn_eval.needle.presets import PRESETS

__all__ = ["EXPERIMENTS", "Experiment", "Size", "Step"]

FULL_LENGTHS = "4k,8k,16k,32k,64k,128k"
GENERATED = "number_string,passkey,kv_retrieval,math_find"


@dataclass(frozen=True)
class Size:
    """What the user chose.  full: the paper's lengths and sample counts.  model: None is the bundled one."""

    full: bool
    model: str | None = None
    device: str = "auto"
    lengths: str | None = None
    n: int | None = None
    data_dir: str | None = None
    position: str = "inside"


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        words: Arguments of `retrieval-attn`, without the output folder.
        folder: Folder of the results, below the experiment's.
        optional: Whether the other steps run after a failure of this one, such as a method that does not fit.
    """

    words: tuple[str, ...]
    folder: str
    optional: bool = False


@dataclass(frozen=True)
class Experiment:
    """A table or figure.  kind: how its results are read.  papers: keys of paper.TABLES beside it.

    cuda: needs a GPU at the paper's size.  scaled: what is smaller without --full.
    """

    title: str
    kind: str
    steps: Callable[[Size], list[Step]]
    papers: tuple[str, ...] = ()
    cuda: bool = False
    scaled: str = ""


def _budgets(size: Size, methods: tuple[str, ...], retrieve: int | None = None) -> list[str]:
    """The paper's budgets, or an eighth of them for contexts a 32nd as long.

    "2K" for streaming_llm, snapkv, quest and infinigen; 640 + 2K for infllm; 128 + 512 + top-100 for the indexes.
    """
    sink, window, k, small = (128, 512, 100, 2048) if size.full else (16, 64, 12, 256)
    k = retrieve if retrieve is not None else k
    words = []
    for method in methods:
        if method in ("streaming_llm", "snapkv", "quest", "infinigen"):
            words += ["--method-option", f"{method}.budget={small}"]
        elif method == "infllm":
            words += ["--method-option", f"infllm.budget={sink + window + small}"]
        elif method in ("flat", "ivf", "retrieval", "retrieval_tail"):
            for key, value in (("sink", sink), ("window", window), ("retrieve", k)):
                words += ["--method-option", f"{method}.{key}={value}"]
    return words


def _suite(size: Size, command: str, methods: tuple[str, ...], lengths: str, n: int, *more: str) -> tuple[str, ...]:
    model = ["--model", size.model] if size.model else []
    span = ["--lengths", size.lengths or lengths] if lengths else []
    asked = ["--methods", ",".join(methods), "--question-position", size.position]
    return (command, *model, "--device", size.device, *asked, *span, "--n", str(size.n or n), *more)


def _papers_tasks(size: Size) -> tuple[str, int, list[str]]:
    """Lengths, samples and flags of InfiniteBench: from its files, or those tasks that can be generated."""
    if size.data_dir:
        return "", 200, ["--data-dir", size.data_dir, "--tasks", ",".join(PAPER_TASKS)]
    return *(("128k", 200) if size.full else ("4k", 3)), ["--tasks", GENERATED]


def _table2(size: Size) -> list[Step]:
    indexes = ("flat", "ivf", "retrieval")
    methods = ("full", "streaming_llm", "snapkv", "infllm", "infinigen", "quest", *indexes)
    lengths, n, more = _papers_tasks(size)
    many = 2000 if size.full else 256
    only = [*more[:-1], "kv_retrieval"]
    return [
        Step(_suite(size, "infinitebench", methods, lengths, n, *more, *_budgets(size, methods)), "run"),
        Step(_suite(size, "infinitebench", indexes, lengths, n, *only, *_budgets(size, indexes, many)), "run-2k"),
    ]


def _table3(size: Size) -> list[Step]:
    """The paper's methods as published, and one that estimates what it does not retrieve."""
    methods = ("full", "streaming_llm", "snapkv", "infllm", "flat", "ivf", "retrieval", "retrieval_tail")
    lengths, n = (FULL_LENGTHS, 200) if size.full else ("2k,4k", 2)
    return [Step(_suite(size, "ruler", methods, lengths, n, *_budgets(size, methods)), "run")]


def _table9(size: Size) -> list[Step]:
    methods = ("full", "infinigen", "quest", "retrieval")
    lengths, n = ("128k", 200) if size.full else ("4k", 3)
    return [Step(_suite(size, "ruler", methods, lengths, n, *_budgets(size, methods)), "run")]


DECODED = {"full": "full", "flat": "flat", "ivf": "ivf", "retrieval": "roargraph"}
"""Methods of the paper's latency tables that `bench session` can measure, with their kinds of index."""
LEFT = 256
"""Positions at the end of a model that questions and answers need."""


def _decode_steps(size: Size, lengths: str) -> list[Step]:
    """One session per length and method: answers of the public API, without an estimate of unretrieved keys."""
    steps = []
    for length in parse_lengths(size.lengths or lengths):
        written = str(length - LEFT) if size.full else f"{length // 1024}k"
        for method, index in DECODED.items():
            words = ["bench", "session", "--model", size.model or "bundled", "--device", size.device]
            words += ["--length", written, "--index", index, "--tail", "without", "--caches", "warm"]
            words += ["--tokens", str(size.n or (16 if size.full else 8)), "--stages", "answer"]
            steps.append(Step(tuple(words), f"decode/{method}-{length}", optional=True))
    return steps


def _decode(lengths: str, scaled: str) -> Callable[[Size], list[Step]]:
    return lambda size: _decode_steps(size, lengths if size.full else scaled)


def _study(figures: str) -> Callable[[Size], list[Step]]:
    def steps(size: Size) -> list[Step]:
        length = size.lengths or ("102400" if size.full else "8192")
        words = ["bench", "study", "--figures", figures, "--length", length, "--source", size.model or "bundled"]
        limit = [] if size.full else ["--n", str(size.n or 4)]
        return [Step((*words, *limit), "run")]

    return steps


def _grid(figure: str) -> Callable[[Size], list[Step]]:
    def steps(size: Size) -> list[Step]:
        model = ["--model", size.model] if size.model else []
        words = ["needle", "--preset", figure, *model, "--device", size.device, "--question-position", size.position]
        lengths = size.lengths or (None if size.full else "2k,4k")
        words += ["--lengths", lengths] if lengths else []
        if size.n or not size.full:
            words += ["--n", str(size.n or 1)]
        if not size.full:
            methods = tuple(PRESETS[figure].methods.split(","))
            words += ["--depths", "0,25,50,75,100", *_budgets(size, methods)]
            words += ["--sink", "16", "--window", "64", "--retrieve", "12"] if "retrieval" in methods else []
        return [Step(tuple(words), "run")]

    return steps


def _table10(size: Size) -> list[Step]:
    """The paper's tasks with top-2000 everywhere, then with as many on average, falling from layer to layer."""
    methods = ("full", "retrieval")
    many, beta = (2000, 20) if size.full else (256, 20)
    lengths, n, more = _papers_tasks(size)
    falling = ["--method-option", f"retrieval.beta={beta}"]
    return [
        Step(_suite(size, "infinitebench", methods, lengths, n, *more, *_budgets(size, methods, many)), "run"),
        Step(
            _suite(size, "infinitebench", methods[1:], lengths, n, *more, *_budgets(size, methods[1:], many), *falling),
            "run-by-layer",
        ),
    ]


def _table11(size: Size) -> list[Step]:
    methods = ("full", "streaming_llm", "quest", "flat", "retrieval")
    lengths, n = ("128k", 200) if size.full else ("4k", 3)
    task = ["--tasks", "kv_retrieval"]
    if size.data_dir:
        lengths, task = "", ["--data-dir", size.data_dir, *task]
    run = Step(_suite(size, "infinitebench", methods, lengths, n, *task, *_budgets(size, methods)), "run")
    return [run, *_decode_steps(size, "128k" if size.full else "4k")]


_EIGHTH = "budgets an eighth"
_FEW_HEADS = "four key-value heads"
_GRID = "2K and 4K at 5 depths instead of"
_WITH_FILES = "Code.D, En.QA and En.MC need --data-dir"

EXPERIMENTS: dict[str, Experiment] = {
    "table2": Experiment(
        "Table 2: InfiniteBench", "tasks", _table2, ("table2",),
        scaled=f"4K instead of 128K, 3 samples instead of 200, {_EIGHTH} (16 sinks, 64 window, top-12; 256 for 2K);"
        f" {_WITH_FILES}",
    ),
    "table3": Experiment(
        "Table 3: RULER by length", "lengths", _table3, ("table3",),
        scaled=f"2K and 4K instead of 4K to 128K, 2 samples per task instead of 200, {_EIGHTH}",
    ),
    "table4": Experiment(
        "Table 4: decode latency", "decode", _decode(FULL_LENGTHS, "2k,4k"), ("table4",), cuda=True,
        scaled="2K and 4K on the CPU instead of 4K to 128K on a GPU",
    ),
    "table5": Experiment(
        "Table 5: parts of a decoded token", "parts", _decode("128k", "4k"), ("table5",), cuda=True,
        scaled="4K on the CPU instead of 128K on a GPU",
    ),
    "table8": Experiment(
        "Table 8: decode latency on an A100, and from 100K to 1M", "decode",
        _decode("100000,200000,500000,1000000", "4k,16k"), ("table8a", "table8b"), cuda=True,
        scaled="4K and 16K on the CPU instead of 100K to 1M on a GPU",
    ),
    "table9": Experiment(
        "Table 9: RULER by task", "tasks", _table9, ("table9",),
        scaled=f"4K instead of 128K, 3 samples per task instead of 200, {_EIGHTH}",
    ),
    "table10": Experiment(
        "Table 10: budget per layer", "layers", _table10, ("table10",),
        scaled=f"4K instead of 128K, 3 samples instead of 200, 256 keys instead of 2,000; {_WITH_FILES}",
    ),
    "table11": Experiment(
        "Table 11: key-value retrieval and decode latency of a large model", "accuracy", _table11, ("table11",),
        scaled="the bundled model on one device instead of Llama-3-70B over eight GPUs, 4K instead of 128K, 3 samples"
        f" instead of 200, {_EIGHTH}; streaming_llm and quest have no latency here",
    ),
    "figure2": Experiment(
        "Figure 2: attention held by 1,000 keys", "study", _study("2"),
        scaled=f"8K tokens instead of 100K, {_FEW_HEADS}",
    ),
    "figure3": Experiment(
        "Figure 3: off-the-shelf indexes, distance of queries", "study", _study("3a,3b"),
        scaled=f"8K tokens instead of 100K, {_FEW_HEADS}",
    ),
    "figure5": Experiment(
        "Figure 5: needle grid", "needle", _grid("figure5"), scaled=f"{_GRID} 4K to 128K at 10, {_EIGHTH}",
    ),
    "figure6": Experiment(
        "Figure 6: recall against keys scored", "study", _study("6"),
        scaled=f"8K tokens instead of 128K, {_FEW_HEADS}",
    ),
    "figure7": Experiment(
        "Figure 7: needle grid of the other methods", "needle", _grid("figure7"),
        scaled=f"{_GRID} 4K to 128K at 10, {_EIGHTH}",
    ),
    "figure8": Experiment(
        "Figure 8: needles from 250K to 1M", "needle", _grid("figure8"), cuda=True,
        scaled=f"{_GRID} 250K to 1M at 10, {_EIGHTH}",
    ),
}  # fmt: skip
