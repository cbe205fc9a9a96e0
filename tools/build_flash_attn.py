"""Builds a small flash-attn 2 wheel from its source package: forward only, one GPU architecture, few head sizes.

    python -m tools.build_flash_attn flash_attn-2.8.3.post2.tar.gz --out DIR [--jobs 16]
    python -m tools.build_flash_attn flash_attn-2.8.3.post2.tar.gz --check

The package's own setup compiles 72 kernel files for four architectures, hours on a laptop. This compiles 24 for
one: no backward, no dropout, no ALiBi, no paged or appended KV cache. Head sizes in between run on the next
larger kernel. `flash_attn_func` and `flash_attn_varlen_func` work as in the full package; the other entries are
missing and fail by name. Needs nvcc, a C++ compiler, and an installed PyTorch with the same CUDA; no network.

Objects are kept under --work: a build that was stopped goes on where it was. --check unpacks, applies the edits
and lists what would be compiled, without a compiler.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MODULE = "flash_attn_2_cuda"
HEAD_DIMS = (64, 128, 256)
TYPES = {"bf16": "cutlass::bfloat16_t", "fp16": "cutlass::half_t"}
# Of an archive of 8,000 files these are needed.
WANTED = ("csrc/flash_attn/", "csrc/cutlass/include/", "flash_attn/", "LICENSE", "PKG-INFO")
PYTHON_FILES = ("__init__.py", "flash_attn_interface.py", "bert_padding.py")
API = "csrc/flash_attn/flash_api.cpp"
LAUNCH = "csrc/flash_attn/src/flash_fwd_launch_template.h"
SWITCHES = "csrc/flash_attn/src/static_switch.h"
NVCC_FLAGS = (
    "-O3 -std=c++17 -U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ -U__CUDA_NO_HALF2_OPERATORS__ "
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__ --expt-relaxed-constexpr --expt-extended-lambda --use_fast_math -w "
    "-DFLASHATTENTION_DISABLE_DROPOUT -DFLASHATTENTION_DISABLE_ALIBI -Xcompiler -fPIC "
    f"-DTORCH_EXTENSION_NAME={MODULE} -DTORCH_API_INCLUDE_EXTENSION_H"
).split()


class BuildError(Exception):
    """The source package is not what the edits were written for, or a compiler failed."""


@dataclass(frozen=True)
class Edit:
    """Replace `old` by `new`, which must occur exactly `times` times: a changed source must not pass unnoticed."""

    path: str
    old: str
    new: str
    times: int = 1


@dataclass(frozen=True)
class Cut:
    """Remove everything from `first` up to, not including, `last`; put `new` there."""

    path: str
    first: str
    last: str | None
    new: str = ""


def head_switch(head_dims: tuple[int, ...]) -> str:
    """The macro that picks the smallest compiled head size that holds the given one."""
    branches = " else ".join(
        f"if (HEADDIM <= {dim}) {{ constexpr static int kHeadDim = {dim}; return __VA_ARGS__(); }}" for dim in head_dims
    )
    return f"#define HEADDIM_SWITCH(HEADDIM, ...) [&] {{ {branches} }}()\n"


def type_switch(types: tuple[str, ...]) -> str:
    """The macro that picks the element type among the compiled ones."""
    if set(types) == set(TYPES):
        bodies = {name: f"using elem_type = {TYPES[name]}; return __VA_ARGS__();" for name in TYPES}
        return (
            f"#define FP16_SWITCH(COND, ...) [&] {{ if (COND) {{ {bodies['fp16']} }} else {{ {bodies['bf16']} }} }}()\n"
        )
    return f"#define FP16_SWITCH(COND, ...) [&] {{ using elem_type = {TYPES[types[0]]}; return __VA_ARGS__(); }}()\n"


def edits(head_dims: tuple[int, ...], types: tuple[str, ...]) -> list[Edit | Cut]:
    """What turns the source into forward-only, for Hopper, `head_dims` ascending and `types`."""
    rounded = "".join(f"head_size <= {dim} ? {dim} : " for dim in head_dims[:-1]) + str(head_dims[-1])
    changes: list[Edit | Cut] = [
        # The C++ side: backward and KV-cache functions go, with their bindings.
        Cut(API, "void run_mha_bwd(Flash_bwd_params", "} // namespace FLASH_NAMESPACE\n"),
        Cut(API, '    m.def("bwd"', '    m.def("fwd_kvcache"'),
        Cut(API, '    m.def("fwd_kvcache"', "}\n"),
        # Row stride of split accumulators = the head size of the kernel that runs.
        Edit(API, "round_multiple(head_size, head_size <= 128 ? 32 : 64)", rounded, 2),
        Edit(API, "TORCH_CHECK(head_size <= 256,", f"TORCH_CHECK(head_size <= {head_dims[-1]},", 2),
        # Kernels for split calls are compiled for splits only, without a cache to append to.
        Edit(
            API,
            "void run_mha_fwd(Flash_fwd_params &params, cudaStream_t stream, bool force_split_kernel=false) {\n",
            "void run_mha_fwd(Flash_fwd_params &params, cudaStream_t stream, bool force_split_kernel=false) {\n"
            '    TORCH_CHECK(!force_split_kernel, "This flash attention build does not support paged KV.");\n',
        ),
        Edit(LAUNCH, "BOOL_SWITCH(params.num_splits > 1, Split,", "ALWAYS_SWITCH(params.num_splits > 1, Split,"),
        Edit(LAUNCH, "BOOL_SWITCH(params.knew_ptr != nullptr,", "NEVER_SWITCH(params.knew_ptr != nullptr,"),
        # Tile shapes of other architectures.
        Edit(LAUNCH, "bool is_sm8x = cc_major == 8 && cc_minor > 0;", "constexpr bool is_sm8x = false;", 2),
        Edit(LAUNCH, "if (is_sm8x) {", "if constexpr (is_sm8x) {", 2),
        Edit(LAUNCH, "if (max_smem_per_block >= 2 * Headdim * (128 + 2 * 64) &&", "if constexpr (false &&"),
        Edit(LAUNCH, "(false && max_smem_per_sm < 4 * Headdim * (64 + 2 * 64))", "(false)"),
        # Switches.
        Cut(SWITCHES, "#define HEADDIM_SWITCH", None, head_switch(head_dims)),
        Cut(SWITCHES, "#define FP16_SWITCH", "#define HEADDIM_SWITCH", type_switch(types)),
        Edit(
            SWITCHES,
            "#pragma once\n",
            "#pragma once\n"
            "#define ALWAYS_SWITCH(COND, NAME, ...) [&] { constexpr bool NAME = true; return __VA_ARGS__(); }()\n"
            "#define NEVER_SWITCH(COND, NAME, ...) [&] { constexpr bool NAME = false; return __VA_ARGS__(); }()\n",
        ),
    ]
    if len(types) == 1:
        kind = {"bf16": "torch::kBFloat16", "fp16": "torch::kFloat16"}[types[0]]
        either = "q_dtype == torch::kFloat16 || q_dtype == torch::kBFloat16"
        changes.append(Edit(API, either, f"q_dtype == {kind}", 2))
    return changes


def apply(text: str, change: Edit | Cut) -> str:
    """`text` after one change. Raises BuildError when the place is not found as often as expected."""
    if isinstance(change, Edit):
        if (found := text.count(change.old)) != change.times:
            raise BuildError(
                f"{change.path}: expected {change.times} x {change.old!r}, found {found}; another release?"
            )
        return text.replace(change.old, change.new)
    start = text.find(change.first)
    stop = len(text) if change.last is None else text.find(change.last, start)
    if start < 0 or stop < 0:
        raise BuildError(f"{change.path}: nothing from {change.first!r} to {change.last!r}; another release?")
    return text[:start] + change.new + text[stop:]


def unpack(sdist: Path, work: Path) -> Path:
    """The wanted files of the source package under `work`/src; returns that folder."""
    target = work / "src"
    shutil.rmtree(target, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        for member in archive:
            inner = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not member.isfile() or not str(inner).startswith(WANTED):
                continue
            if ".." in inner.parts:
                raise BuildError(f"{sdist} holds the unsafe path {member.name}")
            source = archive.extractfile(member)
            assert source is not None
            path = target / inner
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.read())
    if not (target / API).is_file():
        raise BuildError(f"{sdist} holds no {API}; is it the flash-attn source package?")
    return target


def prepare(sdist: Path, work: Path, head_dims: tuple[int, ...], types: tuple[str, ...]) -> Path:
    """Unpacked and edited source."""
    source = unpack(sdist, work)
    for change in edits(head_dims, types):
        path = source / change.path
        path.write_text(apply(path.read_text(encoding="utf-8"), change), encoding="utf-8")
    return source


def kernel_files(source: Path, head_dims: tuple[int, ...], types: tuple[str, ...]) -> list[Path]:
    """The .cu files to compile, those that take longest first."""
    names = [
        f"flash_fwd{split}_hdim{dim}_{kind}{causal}_sm80.cu"
        for dim in reversed(head_dims)
        for split in ("_split", "")
        for causal in ("", "_causal")
        for kind in types
    ]
    paths = [source / "csrc/flash_attn/src" / name for name in names]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise BuildError(f"the source package has no {', '.join(missing)}")
    return paths


def torch_folder(given: str | None) -> Path:
    """Where PyTorch's headers and libraries lie, found without importing it."""
    if given:
        return Path(given)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("PyTorch is not installed; install it or name its folder with --torch")
    return Path(spec.origin).parent


def compile_all(args: argparse.Namespace, source: Path, files: list[Path]) -> list[Path]:
    """Objects of all files, `args.jobs` at a time; an object newer than its inputs' stamp is kept."""
    torch, objects = torch_folder(args.torch), args.work / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    python = args.python_include or sysconfig.get_paths()["include"]
    includes = [
        source / "csrc/flash_attn",
        source / "csrc/flash_attn/src",
        source / "csrc/cutlass/include",
        torch / "include",
        torch / "include/torch/csrc/api/include",
        python,
    ]
    arch = [f"-gencode=arch=compute_{args.arch},code=sm_{args.arch}", "--compress-mode=size"]
    flags = [*NVCC_FLAGS, *arch, *(f"-I{path}" for path in includes)]
    headers = hashlib.sha256()
    for path in sorted((source / "csrc/flash_attn/src").glob("*.h")):
        # The switches only matter to the C++ side; kernels compiled for other head sizes stay good.
        if path.name != Path(SWITCHES).name:
            headers.update(path.read_bytes())

    def compile_one(path: Path) -> tuple[Path, float]:
        whole = path.read_bytes() + ((source / SWITCHES).read_bytes() if path.suffix == ".cpp" else b"")
        key = hashlib.sha256(headers.digest() + whole + " ".join(flags[:-1]).encode()).hexdigest()[:16]
        target = objects / f"{path.stem}-{key}.o"
        started = time.monotonic()
        if not target.exists():
            part = target.with_suffix(".part.o")
            command = [args.nvcc, "-c", str(path), "-o", str(part), *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BuildError(f"{path.name} failed:\n{' '.join(command)}\n{done.stdout}{done.stderr}"[:20000])
            part.rename(target)
        return target, time.monotonic() - started

    made: dict[Path, Path] = {}
    started = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(compile_one, path): path for path in files}
        try:
            for done in as_completed(waiting):
                path = waiting[done]
                made[path], seconds = done.result()
                total = time.monotonic() - started
                print(f"{total:5.0f} s  {len(made):2d} of {len(files)}  {path.name} ({seconds:.0f} s)", flush=True)
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise
    return [made[path] for path in files]


def link(args: argparse.Namespace, objects: list[Path]) -> Path:
    """The extension module from its objects."""
    suffix = args.suffix or sysconfig.get_config_var("EXT_SUFFIX")
    target: Path = args.work / f"{MODULE}{suffix}"
    libraries = ["torch_python", "torch_cpu", "torch_cuda", "c10", "c10_cuda"]
    command = [args.nvcc, "-shared", "-cudart", "shared", "-o", str(target), *map(str, objects)]
    command += ["-Xlinker", "--no-as-needed", f"-L{torch_folder(args.torch) / 'lib'}"]
    command += [f"-l{name}" for name in libraries] + ["-Xlinker", "--strip-all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"linking failed:\n{' '.join(command)}\n{done.stdout}{done.stderr}"[:20000])
    return target


def write_wheel(args: argparse.Namespace, source: Path, module: Path) -> Path:
    """A wheel with the extension, three Python files of the package and its licence; returns its path."""
    metadata = (source / "PKG-INFO").read_text(encoding="utf-8")
    version = next(line.split(": ", 1)[1] for line in metadata.splitlines() if line.startswith("Version: "))
    abi = module.name.split(".")[1].split("-")  # cpython-312-x86_64-linux-gnu
    tag = f"cp{abi[1]}-cp{abi[1]}-linux_{abi[2]}"
    info = f"flash_attn-{version}.dist-info"
    files = {f"flash_attn/{name}": (source / "flash_attn" / name).read_bytes() for name in PYTHON_FILES}
    files[module.name] = module.read_bytes()
    files[f"{info}/licenses/LICENSE"] = (source / "LICENSE").read_bytes()
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {version}\n"
        "Summary: FlashAttention-2, forward only, trimmed build\n"
    ).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: trimmed\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    record = f"{info}/RECORD"
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in files.items()
    ]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    args.out.mkdir(parents=True, exist_ok=True)
    wheel: Path = args.out / f"flash_attn-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


def numbers(text: str) -> tuple[int, ...]:
    """A list such as 64,128 as ascending numbers out of HEAD_DIMS."""
    found = tuple(sorted({int(part) for part in text.split(",")}))
    if not found or not set(found) <= set(HEAD_DIMS):
        raise argparse.ArgumentTypeError(f"head sizes are some of {HEAD_DIMS}, got {text}")
    return found


def kinds(text: str) -> tuple[str, ...]:
    """A list such as bf16,fp16 as names out of TYPES."""
    found = tuple(dict.fromkeys(text.split(",")))
    if not found or not set(found) <= set(TYPES):
        raise argparse.ArgumentTypeError(f"types are some of {', '.join(TYPES)}, got {text}")
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sdist", type=Path, help="flash_attn-2.8.x.tar.gz")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the wheel")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "flash_attn_build",
        help="folder for source and objects",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--head-dims", type=numbers, default=HEAD_DIMS, help="compiled head sizes, e.g. 64,128")
    parser.add_argument("--types", type=kinds, default=tuple(TYPES), help="compiled element types, e.g. bf16")
    parser.add_argument("--arch", default="90", choices=["90"], help="compute capability, without the dot")
    parser.add_argument("--nvcc", default="nvcc", help="the CUDA compiler")
    parser.add_argument("--torch", help="PyTorch's folder; default: the installed one")
    parser.add_argument("--python-include", help="folder of Python.h; default: this Python's")
    parser.add_argument("--suffix", help="file suffix of the module; default: this Python's")
    parser.add_argument("--check", action="store_true", help="unpack, edit and list only")
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    return args


def main(argv: list[str] | None = None) -> int:
    """Command line; 0 when the wheel stands."""
    args = parse(argv)
    try:
        source = prepare(args.sdist, args.work, args.head_dims, args.types)
        files = [source / API, *kernel_files(source, args.head_dims, args.types)]
        if args.check:
            print("\n".join(path.name for path in files))
            return 0
        wheel = write_wheel(args, source, link(args, compile_all(args, source, files)))
    except BuildError as error:
        print(f"build_flash_attn: {error}", file=sys.stderr)
        return 1
    print(f"{wheel} ({wheel.stat().st_size / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
