"""Runs pip into a virtual environment and shows from its first second how far it is.

    python -m tools.install FOLDER WHAT -- PIP ARGUMENTS...

pip says nothing while it unpacks a gigabyte, and without a terminal little else. FOLDER: the virtual environment, which
is made if it is missing, and whose size is shown. WHAT: words for the user. The exit status is pip's; pip's own output
is shown if it fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

EVERY_SECONDS = 3.0


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; files that vanish meanwhile count as nothing."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except OSError:
                continue
    return total


def run(command: list[str], folder: Path, what: str) -> int:
    """Run a command that fills a folder. Return its exit status; its output is printed if that is not 0."""
    began = time.monotonic()
    print(f"installing {what}", flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=EVERY_SECONDS)
                break
            except subprocess.TimeoutExpired:
                spent, size = time.monotonic() - began, folder_bytes(folder) / 1e6
                print(f"  {spent:.0f} s, {size:,.0f} MB in {folder}", flush=True)
    if process.returncode:
        print(output, file=sys.stderr)
    return process.returncode


def main(arguments: list[str]) -> int:
    """Install. Exit status 2 for other arguments than those of the module's text."""
    if len(arguments) < 4 or arguments[2] != "--":
        print("usage: python -m tools.install FOLDER WHAT -- PIP ARGUMENTS...", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    if not (folder / "bin" / "python").exists():
        made = run([sys.executable, "-m", "venv", str(folder)], folder, "a virtual environment")
        if made:
            return made
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return run([*pip, *arguments[3:]], folder, arguments[1])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
