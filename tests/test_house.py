"""How the package may grow: no circle of imports, few levels, files, classes and functions of a size to read."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.test_structure import PACKAGE, ROOT, imported_names, modules

MAX_ROOT_FILES = 13
MAX_LEVELS = 12
MAX_CLASS_LINES = 250
MAX_METHODS = 20
MAX_PARAMETERS = 8

COMPILED = ("njit", "jit", "cfunc", "intrinsic", "overload")
"""Decorators of functions that a compiler reads: what they work on comes as arguments."""


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports() -> dict[str, set[str]]:
    """Modules that each module of the package imports, in functions and under TYPE_CHECKING too."""
    known = {dotted(path) for path in modules()}
    return {
        dotted(path): {name for name in imported_names(path) if name in known} - {dotted(path)} for path in modules()
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of more than one node that all reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reach = {node: reached(node) for node in graph}
    groups = {frozenset(other for other in reach[node] if node in reach[other]) for node in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def test_no_import_circle() -> None:
    assert circles(imports()) == []


def test_a_circle_would_be_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def room(name: str) -> str:
    """The folder right below the package that a module is in, or the module itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def test_few_levels_of_rooms() -> None:
    """The longest chain of rooms that import each other; rooms in a circle would count as one level."""
    rooms: dict[str, set[str]] = {}
    for name, targets in imports().items():
        rooms.setdefault(room(name), set()).update(room(target) for target in targets)
    rooms = {name: targets - {name} for name, targets in rooms.items()}
    together = {name: frozenset(group) for group in circles(rooms) for name in group}

    @cache
    def level(group: frozenset[str]) -> int:
        below = {together.get(target, frozenset({target})) for name in group for target in rooms[name]} - {group}
        return 1 + max((level(other) for other in below), default=0)

    assert max(level(together.get(name, frozenset({name}))) for name in rooms) <= MAX_LEVELS


def test_few_files_at_the_root_of_the_package() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_ROOT_FILES


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_classes_and_functions_are_of_a_size_to_read(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    where = str(path.relative_to(ROOT))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
            assert lines <= MAX_CLASS_LINES, f"{where}: {node.name} has {lines} lines; look for its second noun"
            assert methods <= MAX_METHODS, f"{where}: {node.name} has {methods} methods; look for its second noun"
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any(name in ast.unparse(decorator) for decorator in function.decorator_list for name in COMPILED):
            continue
        given = function.args
        names = [item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        assert count <= MAX_PARAMETERS, f"{where}: {function.name} takes {count} parameters; group them"
