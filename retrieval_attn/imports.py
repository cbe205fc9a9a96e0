"""Make the start of a process quiet and fast: imports of transformers, and weights that are read meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

FIRST_IMPORT = time.perf_counter()
"""When this process began to import the package: its start, but for Python's own."""

NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass and is now natively supported"}
"""Beginnings of messages about missing kernels and about torchao's own enums, by the name of their logger."""


class _Noise(logging.Filter):
    """Drop records whose message begins with `start`."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._start)


_filters = {name: _Noise(start) for name, start in NOISE.items()}


def quiet() -> None:
    """Drop the messages of NOISE from now on; other records of these loggers are kept."""
    for name, noise in _filters.items():
        logging.getLogger(name).addFilter(noise)


UNUSED = ("sklearn", "scipy")
"""What transformers imports, if it is installed, for assisted decoding and losses of object detection."""


def skip_unused() -> None:
    """Let transformers do without UNUSED in this process, a server's: scikit-learn takes a quarter of all imports.

    Call this before models of transformers are imported. Other code can import them as before.
    """
    import transformers.utils.import_utils as checks

    for name in UNUSED:
        if name in sys.modules:
            continue
        is_available = getattr(checks, f"is_{name}_available")
        is_available.cache_clear()  # `import transformers` asks for some
        sys.modules[name] = None  # type: ignore[assignment]  # it cannot be imported
        try:
            is_available()  # the result is cached
        finally:
            del sys.modules[name]


WEIGHTS = (".safetensors", ".gguf")
AHEAD_BYTES = 64 << 20
"""Of a file, at a time."""


def weight_files(model: str) -> list[Path]:
    """Return the files of a model's weights: of a folder, a GGUF file or a hub name that was downloaded. Maybe none."""
    path = Path(model)
    if path.is_file():
        return [path] if path.suffix in WEIGHTS else []
    if not path.is_dir():
        home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
        hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}"
        main = hub / "refs" / "main"
        if not main.is_file():
            return []
        path = hub / "snapshots" / main.read_text(encoding="utf-8").strip()
    return sorted(one for one in path.glob("*") if one.suffix in WEIGHTS)


def read_ahead(model: str) -> threading.Thread:
    """Have threads read a model's weights into the system's page cache, while modules are imported. Returns the first.

    Imports take 5 to 15 s, and a disk of 1.2 GB/s 13 s for 16 GB. Nothing is read that would take more than half of the
    memory that is available. Errors are those of loading the model.
    """
    from retrieval_attn.memory.host_room import available_host_bytes

    def work() -> None:
        with contextlib.suppress(OSError, ValueError):
            files = weight_files(model)
            if 2 * sum(one.stat().st_size for one in files) <= available_host_bytes():
                other = threading.Thread(target=_read_half, args=(files, 1), daemon=True)
                other.start()
                _read_half(files, 0)
                other.join()

    thread = threading.Thread(target=work, name="retrieval_attn-weights", daemon=True)
    thread.start()
    return thread


def _read_half(files: Sequence[Path], half: int) -> None:
    """Read every other AHEAD_BYTES of files. Fewer at a time would wait more often for threads that import."""
    with contextlib.suppress(OSError):
        for path in files:
            room = bytearray(min(AHEAD_BYTES, path.stat().st_size))
            with path.open("rb", buffering=0) as file:
                for start in range(half * AHEAD_BYTES, path.stat().st_size, 2 * AHEAD_BYTES):
                    file.seek(start)
                    file.readinto(room)
