"""README.md and docs/: code blocks run, links resolve, flags exist, tables are what `Config` and `plan` say."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrieval_attn import LLM, Config, plan
from retrieval_attn.cli import build_parser, main
from tests.documents import LANGUAGES, LOCAL, ROOT, Block, blocks, documents, shell_commands, shell_words
from tests.memory.planned_models import MODELS

EXTERNAL = ("http://", "https://")
SERVER = ("fastapi", "uvicorn", "prometheus_client", "python_multipart", "httpx", "openai")
MAX_NOT_RUN = 9
README_BYTES, LIVE_BYTES = 7 * 1024, 80 * 1024
FLAG = re.compile(r"`(--[a-z][a-z-]+)")


def runnable() -> list[Block]:
    return [block for path in documents() for block in blocks(path) if block.language in LANGUAGES and not block.reason]


def book() -> str:
    """A text of some 2,500 tokens with one number to find."""
    line = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    lines = [line] * 80
    lines.insert(40, "The special magic Lisbon number is: 4815162.")
    return "\n".join(lines)


def linked() -> list[Path]:
    """Return the documents whose links are checked."""
    others = ["CHANGELOG.md", "docs/archive/README.md", "training/README.md", "retrieval_attn/model/bundled/README.md"]
    return [*documents(), *(ROOT / name for name in others)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the blocks name, and contexts saved as `book`."""
    path = tmp_path_factory.mktemp("documents")
    (path / "book.txt").write_text(book(), encoding="utf-8")
    (path / "my-model").mkdir()
    (path / "my-model" / "config.json").write_text(json.dumps(MODELS["Llama-3.1-8B"]), encoding="utf-8")
    LLM("bundled").read(book(), save="book", store=str(path / "store"), progress=False)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of a server with the bundled model and an empty store."""
    missing = [name for name in SERVER if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}; install the extras serve and dev")
    from tests.server.process import serving

    with serving("--store", str(tmp_path_factory.mktemp("served")), "--warm-up", "0", preloaded=True) as served:
        yield served.url.removeprefix("http://")


@pytest.mark.parametrize("block", runnable(), ids=lambda block: f"{block.document}:{block.line}")
def test_block_runs(
    block: Block, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a block as it stands; only the server's port differs, and `serve` and `chat` are parsed, not started."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RETRIEVAL_ATTN_STORE", str(folder / "store"))
    code = block.code
    if LOCAL in code and "retrieval-attn serve" not in code:
        code = code.replace(LOCAL, request.getfixturevalue("server"))
    if block.language == "python":
        exec(compile(code, f"{block.document}:{block.line}", "exec"), {"__name__": "__main__"})
        return
    for command in shell_commands(code):
        run_command(command)


def run_command(command: str) -> None:
    """Run one shell command; commands of this program run in this process."""
    words = shell_words(command)
    if words[0] != "retrieval-attn":
        done = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert '"error"' not in done.stdout, done.stdout
    elif words[1] in ("serve", "chat"):
        build_parser().parse_args(words[1:])
    else:
        assert main(words[1:]) == 0


def test_few_blocks_are_not_run() -> None:
    """A block that cannot run says why above it; there are few."""
    skipped = [block for path in documents() for block in blocks(path) if block.reason]
    assert len(skipped) <= MAX_NOT_RUN, [f"{block.document}:{block.line}" for block in skipped]


def test_a_failing_block_fails(tmp_path: Path) -> None:
    """Commands that end with an error, and answers of a server that are errors, are found."""
    for command in ("false", """echo '{"error": {}}'""", "retrieval-attn contexts verify --store nowhere missing"):
        with pytest.raises(AssertionError):
            run_command(command)


def test_shell_code_is_split_into_commands() -> None:
    code = "a b  # c\n\n# d\ne \\\n  f '{\n}'\n"
    assert [shell_words(command) for command in shell_commands(code)] == [["a", "b"], ["e", "f", "{\n}"]]
    with pytest.raises(ValueError, match="does not end"):
        list(shell_commands("a 'b"))


@pytest.mark.parametrize("path", linked(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_resolve(path: Path) -> None:
    """Relative links name files of the repository, and their anchors headings of these."""
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(EXTERNAL):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{path.name} links to {target}"


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_flags_exist(path: Path) -> None:
    """A flag that a document names in prose is one of some command."""
    known = {
        word
        for name in ("docs/commands.md", "eval/docs/commands.md")
        for word in re.findall(r"--[a-z][a-z-]+", (ROOT / name).read_text(encoding="utf-8"))
    }
    named = set(FLAG.findall(path.read_text(encoding="utf-8"))) - OTHER_PROGRAMS
    assert named <= known, f"{path.name} names {sorted(named - known)}"


OTHER_PROGRAMS = {"--numa-binding", "--ulimit"}
"""Flags of torchrun and docker."""


def test_config_page_states_the_defaults() -> None:
    """docs/config.md has a row for each field of Config, with its default."""
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8").partition("## Fields")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.MULTILINE))
    plain = Config().to_dict()
    assert len(rows) == 13
    known = [name for name in rows if name in plain]
    assert [rows[name] for name in known] == [repr(plain[name]) for name in known]


def planned_rows() -> list[list[str]]:
    """Return the cells of README's table of cards."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.partition("## Which card")[2].partition("\n## ")[0].splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ") and "GB" in line
    ]


@pytest.mark.parametrize("row", planned_rows(), ids=lambda row: " ".join(row))
def test_planned_table(row: list[str], tmp_path: Path) -> None:
    """A row of README's table is the plan of that model: it fits the RAM that is named, and not 2 GiB less."""
    card, model, weights, context, ram = row
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")

    def fits(host_gib: int) -> bool:
        quantization = None if weights == "bf16" else weights
        gpu = f"{int(card.removesuffix(' GB')) - 0.5}GiB"
        tokens = int(context.removesuffix("K")) * 1024
        return plan(
            str(tmp_path), context=tokens, gpu_memory=gpu, host_memory=f"{host_gib}GiB", quantization=quantization
        ).fits

    assert fits(int(ram.removesuffix(" GiB")))
    assert not fits(int(ram.removesuffix(" GiB")) - 2)


def test_documents_are_short() -> None:
    """README fits a screen or three, and the live pages an evening."""
    pages = [path for path in documents() if path.parent != ROOT / "eval"]
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES
    assert sum(len(path.read_bytes()) for path in pages) <= LIVE_BYTES
