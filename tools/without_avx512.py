"""Run a command as on a processor with AVX2 and without AVX-512: `python -m tools.without_avx512 pytest tests/index`.

Kernels are compiled for AVX2, and libraries use their AVX2 code. On other processors the command runs as it is.
"""

from __future__ import annotations

import os
import sys

from llvmlite import binding

NEWER = ("avx512", "evex", "avx10", "avxvnni", "amx", "prefer-256")
"""Beginnings of the names of LLVM's features that processors with AVX2 alone lack."""
LIBRARIES = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Zen",
}


def environment() -> dict[str, str]:
    """Return the variables that make this processor one without AVX-512; none if it has no AVX-512."""
    features: dict[str, bool] = dict(binding.get_host_cpu_features())
    if not features.get("avx512f"):
        return {}
    kept = {name: has and not name.startswith(NEWER) for name, has in features.items()}
    text = ",".join(("+" if has else "-") + name for name, has in sorted(kept.items()))
    return {"NUMBA_CPU_NAME": "znver3", "NUMBA_CPU_FEATURES": text, **LIBRARIES}


def main() -> None:
    """Replace this process by `python -m` with the arguments."""
    os.execve(sys.executable, [sys.executable, "-m", *sys.argv[1:]], {**os.environ, **environment()})


if __name__ == "__main__":
    main()
