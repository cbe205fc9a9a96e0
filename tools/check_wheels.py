"""Check both installed distributions without the checkout: commands, package data, an answer of the bundled model.

Run by `make wheels-test` with the Python of an environment that has nothing but the two wheels.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

TEXT = "The grass is green. The sky is blue. " * 60
NEEDLE = "The special magic Bergen number is: 7391846. "
QUESTION = "What is the special magic Bergen number?"


def main() -> int:
    """0: all checks passed; otherwise the first failed check raises."""
    import retrieval_attn as ra
    import retrieval_attn_eval

    here = Path(sysconfig.get_path("purelib")).resolve()
    for package in (ra, retrieval_attn_eval):
        home = Path(str(package.__file__)).resolve()
        if not home.is_relative_to(here):
            raise SystemExit(f"{package.__name__} must come from its wheel in {here}, but was imported from {home}")
    page = Path(str(ra.__file__)).with_name("server") / "page.html"
    if "</html>" not in page.read_text(encoding="utf-8"):
        raise SystemExit(f"the server's status page must be whole, but is cut: {page}")
    program = Path(sys.executable).with_name("retrieval-attn")
    listed = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    missing = [name for name in ("ask", "serve", "needle", "ruler", "bench", "load") if f"    {name} " not in listed]
    if missing:
        raise SystemExit(f"retrieval-attn --help must list {', '.join(missing)}, got:\n{listed}")
    subprocess.run([program, "ruler", "--dry-run", "--lengths", "2k", "--tasks", "niah_single_1"], check=True)
    context = ra.LLM("bundled").read(TEXT + NEEDLE + TEXT, progress=False)
    answer = context.ask(QUESTION, max_new_tokens=12).text
    if "7391846" not in answer:
        raise SystemExit(f"the bundled model must find 7391846, got {answer!r}")
    print("both wheels work without the checkout")
    return 0


if __name__ == "__main__":
    sys.exit(main())
