"""Tables of `tools.card_measures`: JSON with all that was found, Markdown with a row for each number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrieval_attn_eval.bench.plots import table
from retrieval_attn_eval.runs import write_atomically
from tools.card.runs import Run

__all__ = ["markdown", "save"]

COLUMNS = ("measure", "what", "found", "goal", "", "card, MiB", "seconds")


def markdown(runs: Sequence[Run], about: dict[str, Any]) -> str:
    """What was found, then what was run. about: `eval.runs.environment`."""
    machine, versions = about["machine"], about["versions"]
    lines = [
        "# Measures of a card",
        "",
        f"- machine: {about.get('card') or 'no GPU'}; {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB",
        f"- versions: {', '.join(f'{name} {versions[name]}' for name in ('python', 'torch', 'transformers', 'numba'))}",
        f"- commit: {about['commit']}",
        *(["- tiny models on a processor: whether commands work, not what they measure"] if about["tiny"] else []),
        "",
    ]
    cells = []
    for run in runs:
        for number, row in enumerate(run.to_dict()["rows"]):
            found = "" if row["found"] is None else f"{row['found']:.4g} {row['unit']}".strip()
            memory = "" if run.card_bytes is None else f"{run.card_bytes >> 20:,}"
            own = (run.measure.name, memory, f"{run.seconds:.0f}") if number == 0 else ("", "", "")
            cells.append([own[0], row["what"], found, row["goal"], row["verdict"], *own[1:]])
    made = table(COLUMNS, cells, left=1)
    lines += [made[0], made[1].replace("|---:|", "|:---|", 1), *made[2:], ""]
    lines += ["card: most of its memory that was used meanwhile, by nvidia-smi, all processes together.", ""]
    for run in runs:
        lines += [f"- **{run.measure.name}**, {run.status}: {run.measure.setting}. `{run.command}`"]
        lines += [f"  - {line.strip()}" for line in run.note.splitlines()[:1] if line.strip()]
    return "\n".join(lines) + "\n"


def save(folder: Path, runs: Sequence[Run], about: dict[str, Any]) -> str:
    """Write card.json and card.md; returns the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(runs, about)
    write_atomically(folder / "card.json", json.dumps({**about, "runs": [run.to_dict() for run in runs]}, indent=1))
    write_atomically(folder / "card.md", text)
    return text
