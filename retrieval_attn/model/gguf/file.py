"""Read headers of GGUF files, and resolve names to such files. No torch.

A file has a header (metadata, names, shapes and formats of tensors) and the tensors' blocks, which are mapped and not
read here. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from retrieval_attn.errors import InputDataError
from retrieval_attn.model.checkpoint import require_reachable

MAGIC = b"GGUF"
VERSIONS = 2, 3
SUFFIX = ".gguf"
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of `struct` by type of value."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_ALIGNMENT = 32


class StoredTensor(NamedTuple):
    """Name, shape as torch orders it, number of the format, and where the data starts in which file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    path: str
    start: int


class GgufFile(NamedTuple):
    """Metadata by key, and tensors by name: of one file, or of all shards of a model."""

    path: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def architecture(self) -> str:
        """Name of the model's architecture, the prefix of its metadata."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the architecture's value of `key`, such as "block_count"."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


class StoredTexts(Sequence[str]):
    """Texts of an array as they are stored, decoded when they are read: a vocabulary of str takes five times as much.

    data: of each text its length in 8 bytes, then its bytes in UTF-8.
    """

    def __init__(self, data: bytes, count: int) -> None:
        self._data, self._count = data, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        at = 0
        for _ in range(self._count):
            start = at + 8
            at = start + int.from_bytes(self._data[at:start], "little")
            yield self._data[start:at].decode("utf-8", "replace")

    def __getitem__(self, index: Any) -> Any:
        """Return a text, or a list of them for a slice. Decodes all: iterate, or make a list, for many."""
        return list(self)[index]


class _Header:
    """A position in a mapped file, moved by what is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, len(MAGIC)

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        fmt = f"<{count}{code}"
        found = struct.unpack_from(fmt, self.data, self.at)
        self.at += struct.calcsize(fmt)
        return found

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def text(self) -> str:
        size = self.number("Q")
        found = self.data[self.at : self.at + size]
        self.at += size
        if len(found) < size:
            raise struct.error("a text goes beyond the end of the file")
        return found.decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_CODES[kind])
        inner, count = self.number("I"), self.number("Q")
        if count > len(self.data):
            raise struct.error("an array goes beyond the end of the file")
        if inner == _STRING:
            return self.texts(count)
        if inner == _ARRAY:
            return [self.value(inner) for _ in range(count)]
        numbers = self.numbers(_CODES[inner], count)
        return list(numbers) if inner == _BOOL else array(_CODES[inner], numbers)

    def texts(self, count: int) -> StoredTexts:
        start = self.at
        for _ in range(count):
            self.at += 8 + int.from_bytes(self.data[self.at : self.at + 8], "little")
            if self.at > len(self.data):
                raise struct.error("a text goes beyond the end of the file")
        return StoredTexts(self.data[start : self.at], count)


def read(path: str | Path) -> GgufFile:
    """Read the header of a GGUF file, and those of the other shards if it is the first of several.

    Raises InputDataError for damaged and incomplete files, and for other versions of the format.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    for part in _shards(str(path)):
        if not os.path.isfile(part):
            raise InputDataError(f"{path} is one of several files of a model, and {part} is missing; download it too.")
        stat = os.stat(part)
        own, found = _read(part, stat.st_mtime_ns, stat.st_size)
        metadata = metadata or dict(own)
        tensors |= found
    return GgufFile(str(path), metadata, tensors)


@lru_cache(maxsize=2)  # loading a model asks for config, tokenizer and weights
def _read(path: str, changed: int, size: int) -> tuple[Mapping[str, Any], Mapping[str, StoredTensor]]:
    """Metadata and tensors of one file. changed, size: of the file, so that another file is read again."""
    try:
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[: len(MAGIC)] != MAGIC:
                raise InputDataError(f"{path} is no GGUF file: its first bytes are {data[:4]!r}.")
            header = _Header(data)
            version = header.number("I")
            if version not in VERSIONS:
                raise InputDataError(
                    f"{path} is a GGUF file of version {version}, versions {VERSIONS} are supported; convert it with a "
                    "current llama.cpp."
                )
            count, keys = header.numbers("Q", 2)
            metadata = {header.text(): header.value(header.number("I")) for _ in range(keys)}
            entries = []
            for _ in range(count):
                name, axes = header.text(), header.number("I")
                shape = tuple(reversed(header.numbers("Q", axes)))  # the fastest axis is stored first
                entries.append((name, shape, *header.numbers("I"), *header.numbers("Q")))
            alignment = int(metadata.get("general.alignment", _ALIGNMENT))
            start = -(-header.at // alignment) * alignment
    except InputDataError:  # a ValueError
        raise
    except (struct.error, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise InputDataError(f"The header of {path} is damaged ({error}); download the file again.") from error
    tensors = {name: StoredTensor(name, shape, kind, path, start + at) for name, shape, kind, at in entries}
    for tensor in tensors.values():
        if tensor.start > size:
            raise InputDataError(
                f"{path} has {size:,} bytes, but tensor {tensor.name} begins at {tensor.start:,}; the file is "
                "incomplete, download it again."
            )
    return MappingProxyType(metadata), MappingProxyType(tensors)


def _shards(path: str) -> list[str]:
    """Return the names of all shards of a model by the name of one; `path` alone if the model is one file."""
    found = _SHARD.search(path)
    if found is None:
        return [path]
    return [f"{path[: found.start()]}-{number:05}-of-{found[2]}{SUFFIX}" for number in range(1, int(found[2]) + 1)]


def resolve(name: str | Path, *, download: bool) -> str | None:
    """Return the path of the GGUF file that `name` means; None if it means another kind of checkpoint.

    name: a file; a folder without config.json that has one model in GGUF files; or a hub name and a file, such as
    owner/name/file.gguf. download: load a file from the hub that is not cached. Raises InputDataError, and errors of
    huggingface_hub if a download fails.
    """
    path = Path(name)
    if path.is_file():
        return str(path) if _is_gguf(path) else None
    if path.is_dir():
        return None if (path / "config.json").is_file() else _in_folder(path)
    if path.suffix != SUFFIX:
        return None
    if path.is_absolute() or len(path.parts) < 3 or path.parts[0] in ("..", "~"):
        raise InputDataError(
            f"There is no file {str(name)!r}. Give the path of a GGUF file, or owner/name/file{SUFFIX} on the hub."
        )
    return _from_hub("/".join(path.parts[:2]), "/".join(path.parts[2:]), download)


def _is_gguf(path: Path) -> bool:
    """Return True for a file with the name or the first bytes of the format."""
    if path.suffix == SUFFIX:
        return True
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def _in_folder(folder: Path) -> str | None:
    files = sorted(str(path) for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith("mmproj"))
    models = [file for file in files if file == _shards(file)[0]]
    if len(models) > 1:
        names = ", ".join(Path(file).name for file in models)
        raise InputDataError(f"{folder} has {len(models)} GGUF files ({names}); give the path of one of them.")
    return models[0] if models else None


def _from_hub(repository: str, name: str, download: bool) -> str:
    """Return the path of a hub repository's file in the cache, with its other shards."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    found = []
    for part in _shards(name):
        cached = try_to_load_from_cache(repository, part)
        if not isinstance(cached, str) and not download:
            raise InputDataError(
                f"{repository}/{part} is not on this machine, and its header is needed; `hf download {repository} "
                f"{part}` first."
            )
        if not isinstance(cached, str):
            require_reachable(repository, part)
        found.append(cached if isinstance(cached, str) else hf_hub_download(repository, part))
    return found[0]
