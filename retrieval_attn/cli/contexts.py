"""`retrieval-attn contexts ls|verify|gc|rm`: the saved contexts."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.cli.model_args import add_store_argument
from retrieval_attn.memory.units import show_bytes
from retrieval_attn.model.bundled import model_path

if TYPE_CHECKING:
    from retrieval_attn.store import ContextStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommand."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    texts = {
        "ls": "names, tokens, bytes, when they were saved, by which model",
        "verify": "read everything and compare checksums; exit status 1 and a line for what is damaged",
        "gc": "remove files that no context needs and those that interrupted saves left",
        "rm": "remove contexts, and files that no other context needs",
    }
    for name, text in texts.items():
        action = actions.add_parser(name, help=text, description=text)
        add_store_argument(action)
        if name in ("verify", "rm"):
            more = "+" if name == "rm" else "*"
            action.add_argument(
                "names", nargs=more, metavar="NAME", help="saved contexts" + (" (default: all)" * (more == "*"))
            )


def run(args: argparse.Namespace) -> int:
    """One action; `verify` returns 1 if anything is damaged."""
    from retrieval_attn.store import ContextStore

    store = ContextStore(args.store)
    return int({"ls": _list, "verify": _verify, "gc": _gc, "rm": _remove}[args.action](store, args))


def _list(store: ContextStore, args: argparse.Namespace) -> int:
    contexts = store.list()
    if not contexts:
        print(f"no contexts in {store.folder}; retrieval-attn read FILE --save NAME", file=sys.stderr)
        return 0
    rows = [("name", "tokens", "bytes", "saved", "model")]
    for one in contexts:
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.saved_at))
        rows.append((one.name, f"{_plain(one, 'tokens', 0):,}", show_bytes(one.nbytes), saved, _model(one)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _plain(one: Any, name: str, otherwise: Any) -> Any:
    value = one.plain.get(name, otherwise)
    return value if isinstance(value, type(otherwise)) else otherwise


def _model(one: Any) -> str:
    """Return a short name of the model: "bundled", a folder's last part, or a hub name."""
    name = str(_plain(one, "model", ""))
    if name == model_path("bundled"):
        return "bundled"
    return Path(name).name if os.path.isabs(name) else name


def _verify(store: ContextStore, args: argparse.Namespace) -> int:
    from retrieval_attn.compile.progress import ProgressBar

    with ProgressBar(unit="B", unit_scale=True, delay=2.0, leave=False, desc="comparing checksums") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = store.verify(args.names or None, show)
    for one in found:
        print(f"{', '.join(one.names)}: {one.what}")
    if not found:
        print("no damage", file=sys.stderr)
    return 1 if found else 0


def _gc(store: ContextStore, args: argparse.Namespace) -> int:
    print(f"freed {show_bytes(store.gc().nbytes)}", file=sys.stderr)
    return 0


def _remove(store: ContextStore, args: argparse.Namespace) -> int:
    for name in args.names:
        store.remove(name)
    names = "the context" if len(args.names) == 1 else f"{len(args.names)} contexts:"
    print(f"removed {names} {', '.join(args.names)}", file=sys.stderr)
    return _gc(store, args)
