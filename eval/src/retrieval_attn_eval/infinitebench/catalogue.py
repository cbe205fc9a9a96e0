"""The twelve tasks of InfiniteBench: names, published sizes, and which of them can be generated without its files.

Facts of "InfiniteBench: Extending Long Context Evaluation Beyond 100K Tokens" (table 1) and of the benchmark's files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from retrieval_attn.errors import ConfigError

__all__ = ["CATALOGUE", "GENERATED", "PAPER_TASKS", "TASKS", "TITLES", "TaskInfo", "check_tasks"]


@dataclass(frozen=True)
class TaskInfo:
    """title: the paper's column name.  rows: of the published file.  generated: its generator is public.

    choice: the question has four options and the answer is one of them.
    """

    title: str
    rows: int
    generated: bool = False
    choice: bool = False


CATALOGUE: dict[str, TaskInfo] = {
    "passkey": TaskInfo("Retr.P", 590, generated=True),
    "number_string": TaskInfo("Retr.N", 590, generated=True),
    "kv_retrieval": TaskInfo("Retr.KV", 500, generated=True),
    "longbook_sum_eng": TaskInfo("En.Sum", 103),
    "longbook_qa_eng": TaskInfo("En.QA", 351),
    "longbook_choice_eng": TaskInfo("En.MC", 229, choice=True),
    "longdialogue_qa_eng": TaskInfo("En.Dia", 200),
    "longbook_qa_chn": TaskInfo("Zh.QA", 189),
    "code_debug": TaskInfo("Code.D", 394, choice=True),
    "code_run": TaskInfo("Code.R", 400, generated=True),
    "math_calc": TaskInfo("Math.C", 50, generated=True),
    "math_find": TaskInfo("Math.F", 350, generated=True),
}
TASKS = tuple(CATALOGUE)
GENERATED = tuple(name for name, info in CATALOGUE.items() if info.generated)
TITLES = {name: info.title for name, info in CATALOGUE.items()}
# The columns of the paper this package follows (RetrievalAttention, table 2), in its order.
PAPER_TASKS = (
    "number_string",
    "passkey",
    "kv_retrieval",
    "code_debug",
    "math_find",
    "longbook_qa_eng",
    "longbook_choice_eng",
)
_NAMES = {**{name: name for name in TASKS}, **{title.lower(): name for name, title in TITLES.items()}}


def check_tasks(names: Iterable[str], known: Iterable[str] = TASKS) -> tuple[str, ...]:
    """Task names of `names`, which may be task names or the paper's column names, in the order given, once each.

    "all" stands for every name of `known`, "paper" for table 2's.  Raises ConfigError listing the known ones.
    """
    known = tuple(known)
    found: list[str] = []
    for name in (n.strip() for n in names):
        if name in ("all", "paper"):
            found += [n for n in (known if name == "all" else PAPER_TASKS) if name == "all" or n in known]
            continue
        task = _NAMES.get(name.lower())
        if task is None or task not in known:
            raise ConfigError(f"task {name!r} is unknown here; choose from {', '.join(known)}, paper or all")
        found.append(task)
    if not found:
        raise ConfigError(f"needed at least one task, got none; choose from {', '.join(known)}, paper or all")
    return tuple(dict.fromkeys(found))
