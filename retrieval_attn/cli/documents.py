"""Text files as users have them: which can be read, and the command that makes text of the others."""

from __future__ import annotations

import argparse
import codecs
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from retrieval_attn.errors import ConfigError, InputDataError

STANDARD_INPUT = "-"
BINARY_BYTES = 8192
"""Bytes at the start of a file in which a NUL byte says that it is no text."""
_MARKS = (  # the longer mark first: that of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_FORMATS = (
    (b"%PDF", "a PDF", "pdftotext -layout {file} -"),
    (b"PK\x03\x04", "a ZIP archive, as docx, odt and epub files are", "pandoc -t plain {file}"),
    (b"\x1f\x8b", "compressed by gzip", "zcat {file}"),
    (b"{\\rtf", "an RTF document", "pandoc -f rtf -t plain {file}"),
)
"""First bytes of formats that contain text, and the command that prints it."""


def add_encoding_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--encoding`."""
    parser.add_argument(
        "--encoding",
        metavar="NAME",
        help="encoding of text files, such as latin-1 (default: UTF-8, or the byte order mark's)",
    )


def read_documents(files: Sequence[str], encoding: str | None, usage: str) -> str:
    """Return the text of some files, one after the other with a blank line between them.

    files: paths; "-" is the standard input. encoding: None for UTF-8, or the one that a byte order mark states.
    usage: the command with "{file}" in place of a file, for advice. Raises InputDataError, ConfigError, OSError.
    """
    if encoding is not None:
        try:
            codecs.lookup(encoding)
        except LookupError:
            advice = "use a name such as utf-16, latin-1 or cp932"
            raise ConfigError(f"--encoding {encoding!r} is unknown; {advice}") from None
    return "\n\n".join(_read(file, encoding, usage) for file in files)


def _read(file: str, encoding: str | None, usage: str) -> str:
    if file == STANDARD_INPUT:
        data, name = sys.stdin.buffer.read(), "the standard input"
    else:
        data, name = _bytes_of(file, usage), file
    for start, what, command in _FORMATS:
        if data.startswith(start):
            first, piped = command.format(file=shlex.quote(file)), usage.format(file=STANDARD_INPUT)
            raise InputDataError(f"{name} is {what}, not plain text; extract its text: {first} | {piped}")
    text = _decoded(data, encoding, name, usage.format(file=shlex.quote(file)))
    if not text.strip():
        raise InputDataError(f"{name} is {'blank' if text else 'empty'}; give a file with text")
    if text.lstrip()[:100].lower().startswith(("<!doctype html", "<html", "<?xml")):
        print(
            f"{name} is HTML or XML: its tags are read as text. To leave them out: pandoc -t plain {shlex.quote(file)}",
            file=sys.stderr,
        )
    return text


def _bytes_of(file: str, usage: str) -> bytes:
    path = Path(file)
    if path.is_dir():
        raise InputDataError(
            f"{file} is a folder; give its text files: {usage.format(file=shlex.quote(file.rstrip('/')) + '/*.txt')}"
        )
    return path.read_bytes()


def _decoded(data: bytes, encoding: str | None, name: str, command: str) -> str:
    """Text of bytes. Raises InputDataError, with the encoding that fits."""
    marked = next((known for mark, known in _MARKS if data.startswith(mark)), None)
    chosen = encoding or marked or "utf-8"
    if encoding is None and marked is None and b"\0" in data[:BINARY_BYTES]:
        raise InputDataError(f"{name} is a binary file, not text; give a text file (UTF-16 needs --encoding utf-16)")
    try:
        return data.decode(chosen)
    except UnicodeError as error:
        at = f", byte {data[error.start]:#04x} at {error.start}" if isinstance(error, UnicodeDecodeError) else ""
    likely = _likely(data)
    advice = (
        f"it looks like {likely}: {command} --encoding {likely}" if likely else "name its encoding: --encoding NAME"
    )
    raise InputDataError(f"{name} is not {chosen.upper()}{at}; {advice}")


def _likely(data: bytes) -> str | None:
    """Return the single-byte or East Asian encoding that decodes the bytes to plausible text, None if none does."""
    high = sum(byte >= 0x80 for byte in data[: 1 << 16])
    candidates: tuple[str, ...]
    if high > 0.3 * len(data[: 1 << 16]):
        candidates = ("gb18030", "shift_jis", "euc-kr", "big5", "cp1251")
    else:
        candidates = ("cp1252", "latin-1")
    for name in candidates:
        try:
            text = data.decode(name)
        except UnicodeDecodeError:
            continue
        if not any(ord(char) < 32 and char not in "\t\n\r\f" for char in text):
            return name
    return None
