"""The shape of the package: who imports whom, what is exported, links and guards, sizes, generated help."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "retrieval_attn"
ROOMS = ("index", "cpu", "gpu")
EVAL = ROOT / "eval" / "src" / "retrieval_attn_eval"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
MAX_LINES = 700
"""Of any Python file."""

# What each part may import from the package. "" is the package's own __init__, the public API.
ALLOWED: dict[str, set[str]] = {
    "compile": {"", "compile"},
    "store": {"errors", "compile", "store"},
    "index": {"errors", "compile", "index"},
    "cpu": {"errors", "compile", "index", "cpu"},
    "gpu": {"errors", "compile", "gpu"},
}
EVAL_MAY_USE = {"", "config", "errors", "testing", "model.bundled", "model.loading", "memory.units", "index"}
"""Modules of this package that the evaluation imports: the public API, small public modules, and one door inside."""
LEAVES: dict[str, set[str]] = {"errors": set(), "config": {"errors"}}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_names(path: Path) -> Iterator[str]:
    """Absolute dotted names of every import in a file: inside functions and under TYPE_CHECKING too."""
    package = path.relative_to(EVAL.parent if path.is_relative_to(EVAL) else ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            name = ".".join(part for part in (base, node.module or "") if part)
            # `from retrieval_attn import attention` imports that module just as `import retrieval_attn.attention`.
            parent = ROOT.joinpath(*name.split("."))
            for alias in node.names:
                is_module = (parent / alias.name).is_dir() or (parent / f"{alias.name}.py").is_file()
                yield f"{name}.{alias.name}" if is_module else name


def part_of(path: Path) -> str:
    """First path component inside the package, without .py: "index", "cpu", ..., or a top module's name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def wrong_import(path: Path, name: str) -> str:
    """Return why a file of the package may not import a module, or ""."""
    part, (first, _, rest) = part_of(path), name.partition(".")
    if first in {"tests", "training", "tools", "eval", "retrieval_attn_eval", *ROOMS}:
        return "not part of the package"
    if first in {"torch", "transformers"} and part in ("index", "cpu", "store", "remote"):
        return f"{part} must work without torch"
    if first == "transformers" and part == "gpu":
        return "gpu knows tensors, not models"
    allowed = ALLOWED.get(part, LEAVES.get(part))
    if first == "retrieval_attn" and allowed is not None and rest.partition(".")[0] not in allowed:
        return f"{part} may import only {sorted(allowed)}"
    return ""


def test_imports_run_one_way() -> None:
    """index <- cpu <- top modules -> gpu: breaks on any import against it."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}: {why}"
        for path in modules()
        for name in imported_names(path)
        if (why := wrong_import(path, name))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("llm.py", "tests.tiny_models"), ("cli/ask.py", "index"), ("index/flat.py", "torch"),
        ("remote.py", "transformers.utils"), ("gpu/packed.py", "transformers"), ("cpu/store.py", "retrieval_attn.gpu"),
        ("store/writer.py", "retrieval_attn.index.base"), ("errors.py", "retrieval_attn.config"),
        ("config.py", "retrieval_attn.llm"), ("compile/jobs.py", "retrieval_attn.index"),
    ],
)  # fmt: skip
def test_an_import_against_the_order_is_found(file: str, name: str) -> None:
    assert (PACKAGE / file).is_file() and wrong_import(PACKAGE / file, name)


def test_the_evaluation_has_one_door_inside() -> None:
    """It works on the public API and `retrieval_attn.testing`, so that internals may change without it."""
    allowed = {f"retrieval_attn.{name}".removesuffix(".") for name in EVAL_MAY_USE}
    wrong = [
        f"{path}: {name}"
        for path in EVAL.rglob("*.py")
        for name in imported_names(path)
        if name.partition(".")[0] == "retrieval_attn" and name not in allowed
    ]
    assert wrong == [], "export these in retrieval_attn/testing.py"


def test_the_door_exports_what_is_used() -> None:
    """Python loads what type checkers read: the imports of retrieval_attn/testing.py, each of them used."""
    from retrieval_attn import testing

    tree = tree_of(PACKAGE / "testing.py")
    typed = {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("retrieval_attn.")
        for alias in node.names
    }
    assert typed == {(module, name) for name, module in testing._MODULES.items()}
    used = {
        alias.name
        for path in [*EVAL.rglob("*.py"), *(ROOT / "eval" / "tests").rglob("*.py")]
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module == "retrieval_attn.testing"
        for alias in node.names
    }
    assert set(dir(testing)) == used, f"exported, but not used by the evaluation: {sorted(set(dir(testing)) - used)}"
    assert all(getattr(testing, name) is not None for name in dir(testing))


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


LIGHT_MODULES = (
    "retrieval_attn",
    "retrieval_attn.sampling.sampling_params",
    "retrieval_attn.engine.scheduler",
    "retrieval_attn.engine.radix_cache",
    "retrieval_attn.store.crc_kernels",
    "retrieval_attn.index",
    "retrieval_attn.cpu.host_attend",
)


def test_light_modules_import_neither_torch_nor_transformers() -> None:
    """A search-only user, and every --help, must not pay seconds and gigabytes for torch."""
    code = f"""
import importlib, sys
for name in {LIGHT_MODULES}:
    importlib.import_module(name)
    print(name, sorted({{'torch', 'transformers'}} & set(sys.modules)))
"""
    done = python("-c", code)
    assert done.stdout.splitlines() == [f"{name} []" for name in LIGHT_MODULES], done.stdout + done.stderr


def test_help_needs_no_heavy_import() -> None:
    """`retrieval-attn --help` must be instant: no torch, transformers, numba, faiss or matplotlib for it."""
    heavy = {"torch", "transformers", "numba", "faiss", "matplotlib"}
    code = (
        "import sys; from retrieval_attn.cli import build_parser; build_parser().format_help();"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["retrieval_attn", *(f"retrieval_attn.{room}" for room in ROOMS)])
def test_all_is_sorted_and_complete(name: str) -> None:
    """`__all__` names exactly what is public: nothing that does not exist, nothing exported by accident."""
    module = importlib.import_module(name)
    exported = list(getattr(module, "__all__", []))
    assert exported == sorted(set(exported))
    for item in exported:
        assert not isinstance(getattr(module, item), types.ModuleType), f"{name}.{item} is a module"
    public = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and not isinstance(value, types.ModuleType)
        and key not in {"annotations", "TYPE_CHECKING", "Any"}
    }
    assert public <= set(exported), f"public but not in {name}.__all__: {sorted(public - set(exported))}"


def test_every_error_is_public() -> None:
    """`except retrieval_attn.MemoryPlanError` works for each of them, and a new one is not forgotten."""
    errors = importlib.import_module("retrieval_attn.errors")
    found = vars(errors).items()
    names = {name for name, value in found if isinstance(value, type) and issubclass(value, Exception)}
    names = {name for name in names if not name.startswith("_")}
    package = importlib.import_module("retrieval_attn")
    assert names and names <= set(package.__all__)
    assert all(getattr(package, name) is getattr(errors, name) for name in names)


@pytest.mark.parametrize("room", ROOMS)
def test_root_shows_each_room_as_a_relative_link(room: str) -> None:
    """A copied folder instead of a link would drift from the package silently."""
    link = ROOT / room
    assert link.is_symlink()
    assert os.readlink(link) == f"retrieval_attn/{room}"
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("room", ROOMS)
def test_importing_through_a_link_says_what_to_import(room: str) -> None:
    """From the root `import index` finds the link; without the guard every class would exist twice."""
    done = python("-c", f"import {room}")
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("ImportError")
    assert f"import retrieval_attn.{room}" in done.stderr


def test_tools_do_not_visit_files_twice() -> None:
    """Through the links ruff would report, and mypy would type-check, each file under two names."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert config["tool"]["mypy"]["files"] == [
        "retrieval_attn",
        "eval",
        "tests",
        "tools",
        "training",
        "examples",
        "deploy",
    ]
    assert config["tool"]["pytest"]["ini_options"]["testpaths"] == ["tests", "eval/tests"]
    assert config["tool"]["setuptools"]["packages"]["find"]["include"] == ["retrieval_attn*"]
    done = python("-m", "ruff", "check", "--show-files", ".")
    if "No module named ruff" in done.stderr:
        pytest.skip("ruff is not installed; `pip install retrieval-attn[dev]` brings it")
    assert done.returncode == 0, done.stderr
    seen = [Path(line).relative_to(ROOT).parts[0] for line in done.stdout.splitlines()]
    assert "retrieval_attn" in seen
    assert not set(seen) & set(ROOMS)


def text_files() -> list[Path]:
    """Project files a reader may open: code, tests, tools, documents, configuration; no weights or images."""
    skipped = {".safetensors", ".png", ".pyc", ".nbi", ".nbc", ".so"}
    found = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    for folder in ("retrieval_attn", "eval", "tests", "tools", "training", "deploy", "docs", ".ci"):
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in found if path.suffix not in skipped and "__pycache__" not in path.parts)


def test_no_file_is_too_long() -> None:
    """A long file hides a second noun; the limit is a signal to look for it."""
    too_long = {
        str(path.relative_to(ROOT)): lines
        for path in text_files()
        if path.suffix == ".py" and (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not too_long, f"files with too many lines: {too_long}"


def test_files_need_nothing_outside_the_repository() -> None:
    """A path of somebody's machine, or of a folder beside the repository, breaks every other clone."""
    # Written in two halves, or this file would find itself.
    forbidden = ("../" + "shared", "/" + "work/")
    hits = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if any(text in line for text in forbidden)
    ]
    assert not hits, f"machine-specific paths in {hits}"


def test_help_in_the_documents_is_the_programs_help() -> None:
    """Help blocks in docs/commands.md and eval/docs/commands.md are generated: they equal what the program prints."""
    from retrieval_attn.cli import build_parser
    from tools.update_help import outdated

    if sys.version_info[:2] not in {(3, 11), (3, 12)}:
        pytest.skip("argparse words its help differently in other Python versions")
    assert not outdated(build_parser()), "run: python -m tools.update_help"


def test_help_markers_must_be_there() -> None:
    """A lost marker must not make the help block vanish or grow silently."""
    from tools.update_help import BEGIN, END, replace_block

    assert replace_block(f"a\n{BEGIN}\nold\n{END}\nb", "new\n") == f"a\n{BEGIN}\nnew\n{END}\nb"
    for broken in ("a", f"a {BEGIN} b", f"a {END} b {BEGIN}"):
        with pytest.raises(ValueError, match="needs the lines"):
            replace_block(broken, "new")


def test_files_named_in_the_architecture_exist() -> None:
    """A map with roads that were renamed is worse than none."""
    named = re.findall(r"`([\w/]+\.py)`", ARCHITECTURE.read_text(encoding="utf-8"))
    assert named
    missing = [name for name in named if not ((ROOT / name).is_file() or (PACKAGE / name).is_file())]
    assert not missing, f"{ARCHITECTURE.name} names {missing}"


PLACES = ("", "retrieval_attn", "eval", "eval/src/retrieval_attn_eval", "tests")
"""Folders in which a file named in a docstring may be, besides its own folder and that one's parent."""
FOREIGN = ("construct_synthetic_dataset.py", "prompt.py")
"""Files of other projects that docstrings cite."""


def named_files(text: str) -> list[str]:
    """Python files and `room/module.name`s that prose names in backticks."""
    files = re.findall(r"`((?:[\w-]+/)*\w+\.py)`", text)
    return files + [
        f"{module}.py" for module in re.findall(r"`((?:[a-z_]+/)+[a-z_]+)\.(?!(?:py|json|yaml|md)`)\w+`", text)
    ]


def is_a_file(name: str, where: Path) -> bool:
    folders = [*(ROOT / place for place in PLACES), where.parent, where.parent.parent]
    return any((folder / name).exists() for folder in folders) or name.rpartition("/")[2] in FOREIGN


def test_files_named_in_prose_exist() -> None:
    assert named_files("see `cpu/step/run.py` and `attention/layer.CacheLayer`") == [
        "cpu/step/run.py",
        "attention/layer.py",
    ]
    assert not is_a_file("cpu/step/none.py", ROOT / "retrieval_attn/cpu/store.py")
    folders = ("retrieval_attn", "eval/src", "tools", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        if "archive" not in path.parts
        for name in named_files(path.read_text("utf-8"))
        if not is_a_file(name, path)
    ]
    assert missing == []


def test_architecture_maps_every_room() -> None:
    """Each folder and each top module of the package has its line in the table of rooms."""
    text = ARCHITECTURE.read_text(encoding="utf-8").partition("## Rooms")[2].partition("\n## ")[0]
    rooms = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    unnamed = [
        name for name in sorted(rooms | {path.name for path in PACKAGE.glob("[!_]*.py")}) if f"`{name}`" not in text
    ]
    assert not unnamed, f"{ARCHITECTURE.name}, rooms: add {unnamed}"


def test_constraints_satisfy_the_declared_dependencies() -> None:
    """`make venv` passes -c constraints.txt: a dependency without a pin there would float."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = config["project"]
    wanted = project["dependencies"] + sum((project["optional-dependencies"][x] for x in ("dev", "serve")), [])
    evaluation = tomllib.loads((ROOT / "eval" / "pyproject.toml").read_text(encoding="utf-8"))
    wanted += [name for name in evaluation["project"]["dependencies"] if name != "retrieval-attn"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {
        line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line and not line.startswith("#")
    }
    names = {re.split("[<>=;]", item)[0].strip().lower().replace("_", "-") for item in wanted}
    assert names <= pinned, f"not pinned in constraints.txt: {sorted(names - pinned)}"
