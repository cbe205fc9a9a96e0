"""The recipe that trims flash-attn 2: its edits must meet the source they were written for, or stop the build."""

from __future__ import annotations

import io
import tarfile
import zipfile
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import build_flash_attn as build
from tools.build_flash_attn import BuildError, Cut, Edit, apply

KERNELS = [
    f"csrc/flash_attn/src/flash_fwd{split}_hdim{dim}_{kind}{causal}_sm80.cu"
    for split in ("", "_split")
    for dim in (32, 64, 128, 256)
    for kind in ("bf16", "fp16")
    for causal in ("", "_causal")
]


@pytest.fixture
def sdist(tmp_path: Path) -> Callable[..., Path]:
    """Makes an archive in which every edit finds its place exactly as often as it expects."""

    def make(without: str = "", extra: str = "") -> Path:
        texts = {path: "// kernel\n" for path in KERNELS}
        texts |= {f"flash_attn/{name}": f"# {name}\n" for name in build.PYTHON_FILES}
        texts |= {"LICENSE": "BSD\n", "PKG-INFO": "Metadata-Version: 2.1\nVersion: 2.8.9\n"}
        texts |= {"csrc/composable_kernel/huge.h": "// not wanted\n", "tests/test.py": ""}
        # The switches stand in this order in one file, the rest anywhere.
        texts[build.SWITCHES] = "#pragma once\n#define FP16_SWITCH old\n#define HEADDIM_SWITCH old\n"
        cuts = 'void run_mha_bwd(Flash_bwd_params) backward\n} // namespace FLASH_NAMESPACE\n    m.def("bwd")\n'
        texts[build.API] = cuts + '    m.def("fwd_kvcache")\n}\n'
        for change in build.edits(build.HEAD_DIMS, ("bf16",)):
            made_by_an_edit = isinstance(change, Edit) and change.old.startswith("(false")
            if isinstance(change, Edit) and change.path != build.SWITCHES and not made_by_an_edit:
                texts[change.path] = texts.get(change.path, "") + (change.old + "\n") * change.times
        tail = " max_smem_per_sm < 4 * Headdim * (64 + 2 * 64))\n"
        texts[build.LAUNCH] = texts[build.LAUNCH].replace("(128 + 2 * 64) &&\n", "(128 + 2 * 64) &&" + tail)
        if without:
            assert any(without in text for text in texts.values())
            texts = {path: text.replace(without, "") for path, text in texts.items()}
        path = tmp_path / "flash_attn-2.8.9.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, text in texts.items():
                entry = tarfile.TarInfo(f"flash_attn-2.8.9/{name}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
            if extra:
                archive.addfile(tarfile.TarInfo(f"flash_attn-2.8.9/{extra}"))
        return path

    return make


def test_the_edited_source_is_forward_only(
    sdist: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """24 kernels of three head sizes; backward, KV cache and other head sizes are gone from the C++ side."""
    assert build.main([str(sdist()), "--check", "--work", str(tmp_path / "work")]) == 0
    listed = capsys.readouterr().out.split()
    assert listed[0] == "flash_api.cpp" and len(listed) == 25 and not any("hdim32" in name for name in listed)
    source = tmp_path / "work/src"
    api = (source / build.API).read_text()
    assert "backward" not in api and "m.def" not in api and "head_size <= 64 ? 64 : head_size <= 128 ? 128 : 256" in api
    switches = (source / build.SWITCHES).read_text()
    assert "old" not in switches and "kHeadDim = 256" in switches and "kHeadDim = 32" not in switches
    assert "if constexpr (false)" in (source / build.LAUNCH).read_text()
    assert not (source / "csrc/composable_kernel").exists() and not (source / "tests").exists()


def test_fewer_head_sizes_and_types(
    sdist: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--check", "--work", str(tmp_path / "work"), "--head-dims", "128", "--types", "bf16"]
    assert build.main([str(sdist()), *options]) == 0
    assert len(capsys.readouterr().out.split()) == 5
    switches = (tmp_path / "work/src" / build.SWITCHES).read_text()
    assert "half_t" not in switches and "kHeadDim = 64" not in switches
    assert "TORCH_CHECK(head_size <= 128," in (tmp_path / "work/src" / build.API).read_text()


@pytest.mark.parametrize(
    "without", ["if (is_sm8x) {", "#define HEADDIM_SWITCH", 'm.def("bwd"', "params.knew_ptr != nullptr"]
)
def test_another_release_stops_the_build(
    sdist: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], without: str
) -> None:
    """An edit that no longer finds its place is an error with the file's name, not a wrong kernel."""
    assert build.main([str(sdist(without)), "--check", "--work", str(tmp_path / "work")]) == 1
    error = capsys.readouterr().err
    assert "another release?" in error and "csrc/flash_attn/" in error


def test_an_edit_counts_its_places() -> None:
    assert apply("a b a", Edit("f", "a", "c", 2)) == "c b c"
    with pytest.raises(BuildError, match="expected 1 x 'a', found 2"):
        apply("a b a", Edit("f", "a", "c"))
    assert apply("one two three", Cut("f", "two", "three", "2 ")) == "one 2 three"
    assert apply("one two three", Cut("f", "two", None)) == "one "
    with pytest.raises(BuildError, match="nothing from 'four'"):
        apply("one two three", Cut("f", "four", None))


def test_unsafe_paths_and_foreign_archives_are_refused(sdist: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="unsafe path"):
        build.unpack(sdist(extra="flash_attn/../../../escape.py"), tmp_path / "work")
    other = tmp_path / "other.tar.gz"
    with tarfile.open(other, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("other-1.0/setup.py"))
    with pytest.raises(BuildError, match="is it the flash-attn source package"):
        build.unpack(other, tmp_path / "work")


def test_the_wheel_holds_module_package_and_record(sdist: Callable[..., Path], tmp_path: Path) -> None:
    source = build.prepare(sdist(), tmp_path / "work", build.HEAD_DIMS, ("bf16", "fp16"))
    module = tmp_path / "flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so"
    module.write_bytes(b"\x7fELF")
    args = build.parse([str(sdist()), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")])
    wheel = build.write_wheel(args, source, module)
    assert wheel.name == "flash_attn-2.8.9-cp312-cp312-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = archive.read("flash_attn-2.8.9.dist-info/RECORD").decode()
        assert "Version: 2.8.9" in archive.read("flash_attn-2.8.9.dist-info/METADATA").decode()
    assert {module.name, "flash_attn/__init__.py", "flash_attn/flash_attn_interface.py"} < names
    assert {line.split(",")[0] for line in record.splitlines()} == names


@pytest.mark.parametrize("text", ["96", "64,", ""])
def test_unknown_head_sizes_and_types_are_named(text: str) -> None:
    with pytest.raises((ArgumentTypeError, ValueError)):
        build.numbers(text)
    with pytest.raises(ArgumentTypeError, match="bf16"):
        build.kinds("fp8")
