"""How the package may grow: no import cycle, few levels of rooms, and counts that may fall but not rise.

A limit on size alone is obeyed by cutting: each limit of size here has a count of fragmentation next to it. BOUNDS
holds the counts as they are: a change that lowers one lowers its bound in the same commit.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_structure import EVAL, ROOT, imported_names, modules, tree_of

MAX_LEVELS = 12
MAX_CLASS_LINES = 400
SMALL_FILE_LINES = 60

BOUNDS = {
    "lines in files with one importer, of a thousand": 87,
    "files under 60 lines": 11,
    "functions that read private attributes of an argument": 3,
    "parameters of fixed tuples": 83,
    "class names defined more than once": 0,
    "private words in prose": 0,
    "docstrings that begin as a clause": 0,
    "defaults that no caller changes": 37,
    "flags": 104,
}
"""Upper bounds of the counts below, by the name of the count."""

PRIVATE_WORDS = re.compile(r"\b(whoever|nobody|somebody|anew|beside|let go|so many)\b", re.IGNORECASE)
CLAUSE = re.compile(r"(Of|What|Who|Whether what|As)\s")


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports() -> dict[str, set[str]]:
    """Modules that each module of the package imports, in functions and under TYPE_CHECKING too."""
    known = {dotted(path) for path in modules()}
    return {
        dotted(path): {name for name in imported_names(path) if name in known} - {dotted(path)} for path in modules()
    }


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
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


def room(name: str) -> str:
    """The folder right below the package that a module is in, or the module itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def test_no_import_cycle() -> None:
    assert cycles(imports()) == []


def test_a_cycle_would_be_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_few_levels_of_rooms() -> None:
    """The longest chain of rooms that import each other; rooms in a cycle would count as one level."""
    rooms: dict[str, set[str]] = {}
    for name, targets in imports().items():
        rooms.setdefault(room(name), set()).update(room(target) for target in targets)
    rooms = {name: targets - {name} for name, targets in rooms.items()}
    together = {name: frozenset(group) for group in cycles(rooms) for name in group}

    @cache
    def level(group: frozenset[str]) -> int:
        below = {together.get(target, frozenset({target})) for name in group for target in rooms[name]} - {group}
        return 1 + max((level(other) for other in below), default=0)

    assert max(level(together.get(name, frozenset({name}))) for name in rooms) <= MAX_LEVELS


def test_classes_are_of_a_size_to_review() -> None:
    """Files are in `test_structure.test_no_file_is_too_long`."""
    lines = {
        f"{dotted(path)}.{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in modules()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: count for name, count in lines.items() if count > MAX_CLASS_LINES} == {}


# -- counts ----------------------------------------------------------------------------------------


def lines_with_one_importer() -> list[str]:
    """One entry per thousandth of the package's lines that are in files with one importer, in the same room."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, targets in imports().items():
        for target in targets:
            importers[target].add(name)
    total, private = 0, 0
    for path in modules():
        lines, name = len(path.read_text(encoding="utf-8").splitlines()), dotted(path)
        total += lines
        if path.name != "__init__.py" and len(importers[name]) == 1 and room(*importers[name]) == room(name):
            private += lines
    return ["a thousandth"] * round(1000 * private / total)


def small_files() -> list[str]:
    """Files under SMALL_FILE_LINES lines that are no `__init__`."""
    return [
        dotted(path)
        for path in modules()
        if path.name != "__init__.py" and len(path.read_text(encoding="utf-8").splitlines()) < SMALL_FILE_LINES
    ]


def functions_on_private_attributes() -> list[str]:
    """Module functions that read `_private` attributes of an argument whose class is in the same module."""
    found = []
    for path in modules():
        classes = {node.name for node in tree_of(path).body if isinstance(node, ast.ClassDef)}
        for node in tree_of(path).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            own = {
                item.arg
                for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                if item.annotation is not None and classes & set(re.findall(r"\w+", ast.unparse(item.annotation)))
            }
            reads = any(
                isinstance(inner, ast.Attribute)
                and isinstance(inner.value, ast.Name)
                and inner.value.id in own
                and re.match(r"_[^_]", inner.attr)
                for inner in ast.walk(node)
            )
            if reads:
                found.append(f"{dotted(path)}.{node.name}")
    return found


def fixed_tuples() -> list[str]:
    """Parameters annotated as a tuple of a fixed length of two or more."""
    found = []
    for path in modules():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.arg) and node.annotation is not None:
                for inner in ast.walk(node.annotation):
                    if (
                        isinstance(inner, ast.Subscript)
                        and ast.unparse(inner.value) == "tuple"
                        and isinstance(inner.slice, ast.Tuple)
                        and not any(isinstance(item, ast.Constant) and item.value is ... for item in inner.slice.elts)
                    ):
                        found.append(f"{dotted(path)}: {node.arg}")
                        break
    return found


def repeated_classes() -> list[str]:
    """Names of classes that are defined more than once."""
    names = Counter(
        node.name for path in modules() for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def prose() -> Iterator[tuple[str, str]]:
    """Docstrings and comments of the package, each with its module."""
    for path in modules():
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield dotted(path), node.value.value
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.COMMENT:
                yield dotted(path), token.string


def private_words() -> list[str]:
    """Words of PRIVATE_WORDS in docstrings and comments."""
    return [f"{module}: {word}" for module, text in prose() for word in PRIVATE_WORDS.findall(text)]


def clause_docstrings() -> list[str]:
    """Docstrings of classes and functions that begin with a clause in place of a verb or noun."""
    found = []
    for path in modules():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if CLAUSE.match(text):
                    found.append(f"{dotted(path)}.{node.name}")
    return found


def unused_defaults() -> list[str]:
    """Parameters with a default that no call outside tests passes, by the names of functions; public API excepted."""
    import retrieval_attn

    sources = [*modules(), *EVAL.rglob("*.py")]
    for folder in ("tools", "deploy", "examples", "training", "tests/fuzz"):
        sources += (ROOT / folder).rglob("*.py")
    keywords: dict[str, set[str]] = defaultdict(set)
    positions: Counter[str] = Counter()
    for path in sources:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            callee = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if callee == "partial" and node.args:
                callee = ast.unparse(node.args[0]).rpartition(".")[2]
                positions[callee] = max(positions[callee], len(node.args) - 1)
            keywords[callee] |= {item.arg or "**" for item in node.keywords}
            starred = any(isinstance(item, ast.Starred) for item in node.args)
            positions[callee] = max(positions[callee], 99 if starred else len(node.args))
    public, found = set(retrieval_attn.__all__), []
    for path in modules():
        owners: list[ast.Module | ast.ClassDef] = [tree_of(path)]
        owners += [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
        for owner in owners:
            cls = owner.name if isinstance(owner, ast.ClassDef) else ""
            for node in owner.body:
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or {cls, node.name} & public:
                    continue
                if node.decorator_list and cls == "":
                    continue
                name = cls if node.name == "__init__" else node.name
                places = [*node.args.posonlyargs, *node.args.args][1 if cls else 0 :]
                first = len(places) - len(node.args.defaults)
                optional = list(enumerate(places))[max(0, first) :]
                optional += [
                    (98, item)
                    for item, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                    if default is not None
                ]
                for place, item in optional:
                    if place >= positions[name] and not {item.arg, "**"} & keywords[name]:
                        found.append(f"{dotted(path)}.{cls + '.' if cls else ''}{node.name}: {item.arg}")
    return found


def flags() -> list[str]:
    """Different flags of all commands, the evaluation's too, as the generated documents list them."""
    texts = [(ROOT / folder / "commands.md").read_text("utf-8") for folder in ("docs", "eval/docs")]
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", "".join(texts))))


COUNTS = {
    "lines in files with one importer, of a thousand": lines_with_one_importer,
    "files under 60 lines": small_files,
    "functions that read private attributes of an argument": functions_on_private_attributes,
    "parameters of fixed tuples": fixed_tuples,
    "class names defined more than once": repeated_classes,
    "private words in prose": private_words,
    "docstrings that begin as a clause": clause_docstrings,
    "defaults that no caller changes": unused_defaults,
    "flags": flags,
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_do_not_rise(name: str) -> None:
    """`python -m tests.test_house` prints all of them; a count below its bound lowers the bound."""
    found = COUNTS[name]()
    assert len(found) == BOUNDS[name], f"{name}: {len(found)}, bound {BOUNDS[name]}; {found}"


if __name__ == "__main__":
    for name, count in COUNTS.items():
        print(f"    {name!r}: {len(count())},")
