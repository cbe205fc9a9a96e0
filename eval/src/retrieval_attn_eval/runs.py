"""Results folders of evaluations: append-only rows, resume by row id, never anything overwritten.

A run folder holds config.json (the settings that decide what a row means, and their fingerprint), env.json (one
entry per start: versions, commit, machine, command), predictions.jsonl (one row per line, each line on the disk
before the next row starts) and derived files that can be made again from the rows at any time.
It knows nothing about tasks or models.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from retrieval_attn.errors import InputDataError, RetrievalAttentionError
from retrieval_attn_eval.parsed import parsed
from retrieval_attn_eval.replace import replace_file

__all__ = ["RunFolder", "RunFolderError", "environment", "fingerprint", "read_rows", "utc_now", "write_atomically"]

_SCORES = (int, float, type(None))
CONFIG, ENVIRONMENT, ROWS = "config.json", "env.json", "predictions.jsonl"
_PACKAGES = ("retrieval-attn", "torch", "transformers", "tokenizers", "numpy", "numba", "faiss-cpu")


class RunFolderError(RetrievalAttentionError):
    """A results folder is malformed, in use or of other settings; the message has the difference."""


def fingerprint(settings: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of the settings as canonical JSON: the order of keys does not matter."""
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def utc_now() -> str:
    """Time stamp in UTC, ISO 8601 with seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_atomically(path: Path, data: str | bytes) -> None:
    """Replace `path` as a whole: a reader or a crash sees the old file or the new one, never a part."""
    replace_file(path, lambda file: file.write(data.encode() if isinstance(data, str) else data))


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Rows of a jsonl file and the number of its intact bytes.

    A last line without its line break was torn by a crash: it is left out, and the byte count ends before it.
    A missing file gives no rows.  Raises RunFolderError, with the line number, for anything else that is no row.
    """
    data = path.read_bytes() if path.exists() else b""
    intact = data.rfind(b"\n") + 1
    rows = []
    for number, line in enumerate(data[:intact].splitlines(), start=1):
        try:
            row = parsed(line)
        except ValueError:
            row = None
        score = row.get("score") if isinstance(row, dict) else None
        if not isinstance(row, dict) or not isinstance(row.get("id"), str) or not isinstance(score, _SCORES):
            raise RunFolderError(
                f"{path}, line {number}: needed a JSON object with an id that is text, and a score, if any, that is a "
                f"number; found {line[:60]!r}; remove this line or choose another folder"
            )
        rows.append(row)
    return rows, intact


class RunFolder:
    """A results folder opened for writing; use as a context manager.

    rows: id -> newest row.  A row with an "error" counts as missing (see `missing`), so it is tried again.
    """

    def __init__(self, path: Path, config: dict[str, Any], file: IO[bytes], rows: list[dict[str, Any]]) -> None:
        self.path = path
        self.config = config
        self.rows: dict[str, dict[str, Any]] = {row["id"]: row for row in rows}
        self._file = file

    @classmethod
    def check(cls, path: Path, settings: Mapping[str, Any]) -> None:
        """Refuse a folder that `open` would refuse, without creating or changing anything.

        Raises RunFolderError if the folder holds something else or the results of other settings.
        """
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path}: needed a folder for results, found a file; choose another output folder")
        config_file = path / CONFIG
        if not config_file.exists():
            strangers = sorted(p.name for p in path.iterdir() if not p.name.startswith(".")) if path.exists() else []
            if strangers:
                raise RunFolderError(
                    f"{path}: needed a new, an empty or a results folder, found {', '.join(strangers[:3])}"
                    f" and no {CONFIG}; choose another output folder"
                )
            return
        found = _read_json(config_file)
        if not isinstance(found, dict) or "fingerprint" not in found or not isinstance(found.get("settings"), dict):
            raise RunFolderError(f"{config_file}: needed fingerprint and settings; choose another output folder")
        if found["fingerprint"] != fingerprint(settings):
            raise RunFolderError(
                f"{path} holds results of other settings ({_differences(found['settings'], settings)});"
                " repeat with the same settings or choose another output folder"
            )

    @classmethod
    def open(cls, path: Path, settings: Mapping[str, Any], *, start: Mapping[str, Any] | None = None) -> RunFolder:
        """Create the folder, or continue one whose settings have the same fingerprint.

        settings: JSON values that decide what a row means; not the list of rows to make, so that a folder can grow.
        start: what to note about this start in env.json.
        Raises RunFolderError for a folder of other settings, of another process that is still writing, or with
        damaged rows.
        """
        cls.check(path, settings)
        path.mkdir(parents=True, exist_ok=True)
        config_file = path / CONFIG
        if not config_file.exists():
            config = {"fingerprint": fingerprint(settings), "created": utc_now(), "settings": dict(settings)}
            write_atomically(config_file, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        config = _read_json(config_file)
        file = open(path / ROWS, "ab")  # noqa: SIM115  the run folder keeps it open and closes it
        try:
            _lock(file, path)
            rows, intact = read_rows(path / ROWS)
            if file.tell() != intact:
                file.truncate(intact)
            _sync_folder(path)
            env_file = path / ENVIRONMENT
            starts = _read_json(env_file) if env_file.exists() else []
            if not isinstance(starts, list):
                raise RunFolderError(f"{env_file}: needed a list of starts; remove it or choose another output folder")
            starts.append({"started": utc_now(), **(start or {})})
            write_atomically(env_file, json.dumps(starts, indent=2, ensure_ascii=False) + "\n")
        except BaseException:
            file.close()
            raise
        return cls(path, config, file, rows)

    def missing(self, ids: Iterable[str]) -> list[str]:
        """Those of `ids` that have no row yet, or only one with an error; in the given order."""
        return [i for i in ids if i not in self.rows or self.rows[i].get("error")]

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write rows in one piece; they are on the disk when this returns.

        Raises ValueError for an id that already has a row without an error: nothing is overwritten.
        """
        for row in rows:
            known = self.rows.get(row["id"])
            if known is not None and not known.get("error"):
                raise ValueError(f"{row['id']} already has a row in {self.path / ROWS}")
        self._file.write(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows.update({row["id"]: dict(row) for row in rows})

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Config and newest rows of a results folder, read only.  Raises InputDataError if there is none at `path`."""
    if not (path / CONFIG).is_file() or not (path / ROWS).is_file():
        raise InputDataError(f"{path}: needed a results folder with {CONFIG} and {ROWS}; give the folder of a run")
    rows, _ = read_rows(path / ROWS)
    config = _read_json(path / CONFIG)
    if not isinstance(config, dict) or not isinstance(config.get("settings"), dict):
        raise RunFolderError(f"{path / CONFIG}: needed fingerprint and settings; give the folder of a run")
    return config, list({row["id"]: row for row in rows}.values())


def environment() -> dict[str, Any]:
    """Versions, commit and machine, as JSON values; nothing that names the user or the host."""
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "versions": {"python": platform.python_version(), **versions},
        "commit": _commit(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": _memory_gib(),
        },
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _read_json(path: Path) -> Any:
    try:
        return parsed(path.read_bytes())
    except ValueError as error:
        raise RunFolderError(f"{path}: not JSON ({error}); choose another output folder") from None
    except IsADirectoryError:
        raise RunFolderError(f"{path}: needed a file, found a folder; choose another output folder") from None


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    flat_there, flat_here = _flatten(there), _flatten(here)
    keys = [k for k in {**flat_there, **flat_here} if flat_there.get(k) != flat_here.get(k)]
    shown = [f"{k}: {_short(flat_there.get(k))} there, {_short(flat_here.get(k))} here" for k in keys[:4]]
    return "; ".join(shown + ([f"{len(keys) - 4} more"] if len(keys) > 4 else []))


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 48 else text[:45] + "..."


def _lock(file: IO[bytes], path: Path) -> None:
    """Hold the rows file for this process; the system lets go of it however the process ends."""
    try:
        import fcntl
    except ImportError:  # no such lock on this system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise RunFolderError(
            f"{path}: another process is writing into this folder; wait for it or choose another output folder"
        ) from None


def _sync_folder(path: Path) -> None:
    """Make the names of new files durable too; a file's own sync does not cover its folder."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _commit() -> str | None:
    """Commit of the source checkout this package runs from, "+" for local changes; None if installed elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10)
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if status.stdout.strip() else "") if head.returncode == 0 else None


def _cpu_name() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
