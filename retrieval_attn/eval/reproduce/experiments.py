"""What is run for each table and figure: commands of this package, scaled down unless asked for the paper's size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from retrieval_attn.eval.infinitebench.catalogue import PAPER_TASKS

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
    """One command.  words: as typed after `retrieval-attn`; folder: where its results go, below the experiment's.

    The output folder is added when it runs.  module: run this module instead of the command line.
    """

    words: tuple[str, ...]
    folder: str
    module: str | None = None


@dataclass(frozen=True)
class Experiment:
    """A table or figure.  kind: how its results are read.  papers: keys of paper.TABLES beside it.

    missing: why it cannot be run by this version at all; cuda: needs a GPU at any size; cuda_if_full: at the paper's.
    """

    title: str
    kind: str
    steps: Callable[[Size], list[Step]]
    papers: tuple[str, ...] = ()
    missing: str | None = None
    cuda: bool = False
    cuda_if_full: bool = False
    scaled: str = ""


def _budgets(size: Size, methods: tuple[str, ...], top_k: int | None = None) -> list[str]:
    """The paper's budgets, or an eighth of them for contexts a 32nd as long.

    "2K" for streaming_llm, snapkv, quest and infinigen; 640 + 2K for infllm; 128 + 512 + top-100 for the indexes.
    """
    sink, window, k, small = (128, 512, 100, 2048) if size.full else (16, 64, 12, 256)
    k = top_k if top_k is not None else k
    words = []
    for method in methods:
        if method in ("streaming_llm", "snapkv", "quest", "infinigen"):
            words += ["--method-option", f"{method}.budget={small}"]
        elif method == "infllm":
            words += ["--method-option", f"infllm.budget={sink + window + small}"]
        elif method in ("flat", "ivf", "retrieval"):
            for key, value in (("sink", sink), ("window", window), ("top_k", k)):
                words += ["--method-option", f"{method}.{key}={value}"]
    return words


def _suite(size: Size, command: str, methods: tuple[str, ...], lengths: str, n: int, *more: str) -> tuple[str, ...]:
    model = ["--model", size.model] if size.model else []
    return (
        command,
        *model,
        "--device",
        size.device,
        "--methods",
        ",".join(methods),
        "--question-position",
        size.position,
        *(("--lengths", size.lengths or lengths) if lengths else ()),
        "--n",
        str(size.n or n),
        *more,
    )


def _table2(size: Size) -> list[Step]:
    indexes = ("flat", "ivf", "retrieval")
    methods = ("full", "streaming_llm", "snapkv", "infllm", "infinigen", "quest", *indexes)
    if size.data_dir:
        lengths, n = "", 200
        more = ["--data-dir", size.data_dir, "--tasks", ",".join(PAPER_TASKS)]
    else:
        lengths, n = ("128k", 200) if size.full else ("4k", 3)
        more = ["--tasks", GENERATED]
    many = 2000 if size.full else 256
    only = [*more[:-1], "kv_retrieval"]
    return [
        Step(_suite(size, "infinitebench", methods, lengths, n, *more, *_budgets(size, methods)), "run"),
        Step(_suite(size, "infinitebench", indexes, lengths, n, *only, *_budgets(size, indexes, many)), "run-2k"),
    ]


def _table3(size: Size) -> list[Step]:
    methods = ("full", "streaming_llm", "snapkv", "infllm", "flat", "ivf", "retrieval")
    lengths, n = (FULL_LENGTHS, 200) if size.full else ("2k,4k", 2)
    return [Step(_suite(size, "ruler", methods, lengths, n, *_budgets(size, methods)), "run")]


def _table9(size: Size) -> list[Step]:
    methods = ("full", "infinigen", "quest", "retrieval")
    lengths, n = ("128k", 200) if size.full else ("4k", 3)
    return [Step(_suite(size, "ruler", methods, lengths, n, *_budgets(size, methods)), "run")]


def _speed(lengths: str, scaled: str, *, cuda: bool = False) -> Callable[[Size], list[Step]]:
    def steps(size: Size) -> list[Step]:
        chosen = size.lengths or (lengths if size.full else scaled)
        longest = max(int(part) for part in chosen.split(","))
        device = size.device if size.device != "auto" else ("cuda" if size.full or cuda else "cpu")
        found = []
        for name, index in (("flat", "flat"), ("ivf", "ivf"), ("retrieval", "roargraph")):
            words = ["speed", "decode", "--model", size.model or "bundled", "--device", device, "--index", index]
            words += ["--lengths", chosen, "--read", str(longest), "--rounds", str(size.n or (5 if size.full else 2))]
            found.append(Step((*words, "--tokens", "16" if size.full else "8"), name))
        return found

    return steps


def _study(figures: str) -> Callable[[Size], list[Step]]:
    def steps(size: Size) -> list[Step]:
        length = size.lengths or ("102400" if size.full else "8192")
        words = ["bench", "study", "--figures", figures, "--length", length, "--source", size.model or "bundled"]
        limit = [] if size.full else ["--limit", str(size.n or 4)]
        return [Step((*words, *limit), "run")]

    return steps


def _grid(methods: tuple[str, ...]) -> Callable[[Size], list[Step]]:
    def steps(size: Size) -> list[Step]:
        lengths, n = (FULL_LENGTHS, 3) if size.full else ("2k,4k", 1)
        depths = "0,11,22,33,44,56,67,78,89,100" if size.full else "0,25,50,75,100"
        words = _suite(size, "", methods, lengths, n, "--depths", depths, *_budgets(size, methods))[1:]
        return [Step(words, "run", "retrieval_attn.eval.reproduce.needle_grid")]

    return steps


def _figure8(size: Size) -> list[Step]:
    model = ["--model", size.model] if size.model else []
    lengths = size.lengths or "250k,500k,750k,1000k"
    words = ["needle", *model, "--device", size.device, "--methods", "retrieval", "--lengths", lengths]
    return [Step((*words, "--rounds", str(size.n or 1)), "run")]


def _none(size: Size) -> list[Step]:
    return []


EXPERIMENTS: dict[str, Experiment] = {
    "table2": Experiment(
        "Table 2: InfiniteBench",
        "tasks",
        _table2,
        ("table2",),
        scaled="4K instead of 128K, 3 samples instead of 200, budgets an eighth (16 sinks, 64 window, top-12; 256"
        " for 2K); Code.D, En.QA and En.MC need --data-dir",
    ),
    "table3": Experiment(
        "Table 3: RULER by length",
        "lengths",
        _table3,
        ("table3",),
        scaled="2K and 4K instead of 4K to 128K, 2 samples per task instead of 200, budgets an eighth",
    ),
    "table4": Experiment(
        "Table 4: decode latency",
        "speed",
        _speed("4096,8192,16384,32768,65536,131072", "2048,4096"),
        ("table4",),
        cuda_if_full=True,
        scaled="2K and 4K on the CPU instead of 4K to 128K on a GPU",
    ),
    "table5": Experiment(
        "Table 5: parts of a decoded token",
        "parts",
        _speed("131072", "4096"),
        ("table5",),
        cuda_if_full=True,
        scaled="4K on the CPU instead of 128K on a GPU",
    ),
    "table8": Experiment(
        "Table 8: decode latency on an A100, and from 100K to 1M",
        "speed",
        _speed("100000,200000,500000,1000000", "131072", cuda=True),
        ("table8a", "table8b"),
        cuda=True,
        scaled="128K instead of 100K to 1M",
    ),
    "table9": Experiment(
        "Table 9: RULER by task",
        "tasks",
        _table9,
        ("table9",),
        scaled="4K instead of 128K, 3 samples per task instead of 200, budgets an eighth",
    ),
    "table10": Experiment(
        "Table 10: budget per layer",
        "tasks",
        _none,
        ("table10",),
        missing="needs a number of retrieved keys per layer; Config.top_k is one number for all layers",
    ),
    "table11": Experiment(
        "Table 11: a 70B model over eight GPUs",
        "tasks",
        _none,
        ("table11",),
        missing="needs a model divided over eight GPUs by layers, which no command of this version does",
    ),
    "figure2": Experiment(
        "Figure 2: attention held by 1,000 keys",
        "study",
        _study("2"),
        scaled="8K tokens instead of 100K, four key-value heads",
    ),
    "figure3": Experiment(
        "Figure 3: off-the-shelf indexes, distance of queries",
        "study",
        _study("3a,3b"),
        scaled="8K tokens instead of 100K, four key-value heads",
    ),
    "figure5": Experiment(
        "Figure 5: needle grid",
        "grid",
        _grid(("full", "retrieval")),
        scaled="2K and 4K at 5 depths instead of 4K to 128K at 10, budgets an eighth",
    ),
    "figure6": Experiment(
        "Figure 6: recall against keys scored",
        "study",
        _study("6"),
        scaled="8K tokens instead of 128K, four key-value heads",
    ),
    "figure7": Experiment(
        "Figure 7: needle grid of the other methods",
        "grid",
        _grid(("streaming_llm", "snapkv", "infllm", "flat", "ivf")),
        scaled="2K and 4K at 5 depths instead of 4K to 128K at 10, budgets an eighth",
    ),
    "figure8": Experiment(
        "Figure 8: needles from 250K to 1M",
        "needle",
        _figure8,
        cuda=True,
        scaled="nothing: 250K to 1M at any rate",
    ),
}
