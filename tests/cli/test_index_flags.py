"""Index specs and command lines that documents, help texts and tools name: all of them parse with today's options."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

import retrieval_attn as ra
import retrieval_attn_eval.baselines.faiss_index  # noqa: F401  (registers ivf and hnsw)
from retrieval_attn.cli import build_parser
from retrieval_attn.config import named_options
from retrieval_attn.index.device import PLANNED
from retrieval_attn.index.spec import IndexSpec, available
from retrieval_attn.memory.index_choice import brought_size, with_rows
from retrieval_attn_eval.bench.methods import parse
from tools.card.full_keys import WAYS
from tools.card.measure import Measure
from tools.card.table import SCANNED, measures

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "eval/docs", "eval/src", "retrieval_attn", "tools", "examples", "deploy", "training")
OLD = ("docs/archive/", "CHANGELOG.md")
"""Texts that name options of earlier versions."""
SUFFIXES = (".md", ".py", ".sh", ".toml", ".yaml", ".yml", "Makefile")
KINDS = (*available(), PLANNED)
SPEC = re.compile(rf"(?<![\w-])(?:{'|'.join(sorted(KINDS, key=len, reverse=True))})(?::[a-z_]\w*=\w+(?:\.\d+)?)+")


def specs_in(text: str) -> list[str]:
    """Every `KIND:OPTION=VALUE:OPTION=VALUE` of a text."""
    return SPEC.findall(text)


def written_specs() -> list[tuple[str, str]]:
    """File and spec, of all files that a user or a maintainer copies commands from."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.name.endswith(SUFFIXES)]
    found = []
    for path in sorted([*paths, *ROOT.glob("*.md"), ROOT / "Makefile"]):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(OLD):
            found += [(name, spec) for spec in specs_in(path.read_text(encoding="utf-8"))]
    return found


def test_specs_are_found_in_texts() -> None:
    assert specs_in("--index device:key_bytes=40:int8_rows=True, or my-device:key_bytes=8") == [
        "device:key_bytes=40:int8_rows=True"
    ]
    names = {name for name, _ in written_specs()}
    assert {"docs/config.md", "docs/server.md", "retrieval_attn/cli/model_args.py", "tools/card/table.py"} <= names


@pytest.mark.parametrize(("name", "spec"), sorted(set(written_specs())))
def test_written_index_specs_parse(name: str, spec: str) -> None:
    kind, options = named_options(spec)
    assert IndexSpec.of(kind, options).kind == kind


@pytest.mark.parametrize("tiny", [False, True], ids=["card", "tiny"])
@pytest.mark.parametrize("number", range(len(measures())))
def test_commands_of_card_measures_parse(number: int, tiny: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are parsed by the command's own parser, index specs and Config options by `parse` and `Config`."""
    measure = measures(tiny=tiny)[number]
    args = parsed(measure, monkeypatch)
    if hasattr(args, "systems") and measure.module.startswith("tools."):
        for spec in parse(args.systems, known=tuple(WAYS)):
            ra.Config().replace(**WAYS.get(spec.name, {"index": spec.name, "index_options": spec.options}))


def parsed(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The arguments of a measure's process; nothing of the command runs."""
    arguments = [*measure.arguments, measure.folder, "unused"]
    if measure.module == "retrieval_attn.cli":
        return build_parser().parse_args(arguments)
    parse_args: Any = argparse.ArgumentParser.parse_args
    found: list[argparse.Namespace] = []

    class Parsed(Exception):
        pass

    def stop(parser: argparse.ArgumentParser, given: list[str] | None = None) -> NoReturn:
        found.append(parse_args(parser, given))
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [measure.module, *arguments])
    with pytest.raises(Parsed):
        importlib.import_module(measure.module).main()
    return found[0]


def test_codes_on_the_host_are_measured_as_auto_lays_them_out() -> None:
    """For heads of 128 numbers and 100 keys per token, with the int8 rows that a device reads."""
    size = brought_size(128, 100)
    assert size is not None
    chosen = with_rows(ra.Config(index=PLANNED, index_options=size))
    assert named_options(f"{SCANNED}:codes_on_host=True") == (chosen.index, dict(chosen.index_options))
