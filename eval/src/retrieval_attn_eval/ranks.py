"""Commands that a launcher (torchrun) runs in several processes at once: one of them writes and prints."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def is_follower() -> bool:
    """Whether a launcher started this process as another than the first."""
    return os.environ.get("RANK", "0") != "0"


@contextlib.contextmanager
def one_writer(folder: Path) -> Iterator[Path]:
    """The folder for this process's results: `folder` in the first process, a private copy in every other.

    The processes of a model whose heads are shared must do the same work in the same order, also when a run is
    continued, so each starts from the rows that are there. Enter before the model is loaded: its processes meet there,
    and the first writes nothing earlier. What the others write is removed, and what they print is not shown; their
    errors are raised.
    """
    if not is_follower():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="retrieval-attn-") as name:
        copy = Path(name) / "results"
        copy.mkdir()
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.is_file():
                shutil.copy(file, copy)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield copy
