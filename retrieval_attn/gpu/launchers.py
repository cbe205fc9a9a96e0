"""Triton's launchers, C functions that pass a kernel's arguments on, are loaded by one thread at a time.

Kernels with arguments of the same types share a launcher's file, and all launchers are modules of one name. Who loads a
file that is loaded gets, by CPython's rules for such modules, the last module of that name, into which this file's
function is written; Triton then reads it there. A thread that loads another launcher between the two leaves its own
function, and the kernel is launched by it: "function takes exactly 33 arguments (28 given)".
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["load_launchers_in_turn"]

_loading = threading.Lock()


def load_launchers_in_turn() -> None:
    """Have Triton make launchers one after the other, also those of other libraries' kernels; again: the same.

    Raises ImportError where there is no Triton, RuntimeError where it finds no device.
    """
    import triton  # there is none without a GPU

    in_turn(triton.runtime.driver.active)


def in_turn(driver: Any) -> None:
    """Let one thread at a time make launchers of this driver. One that has no such classes is left as it is."""
    make = getattr(driver, "launcher_cls", None)
    if make is None or hasattr(make, "made_in_turn"):
        return

    def made_in_turn(*args: Any) -> Any:
        with _loading:
            return make(*args)

    setattr(made_in_turn, "made_in_turn", True)  # noqa: B010  not an assignment: mypy knows no such attribute
    driver.launcher_cls = made_in_turn
