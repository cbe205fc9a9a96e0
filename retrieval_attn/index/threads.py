"""How many threads a parallel kernel may use, and which of them may run at once.

Numba's `workqueue` layer (what it falls back to where the system has no libgomp and no TBB) aborts the
process when two Python threads enter a parallel kernel; there, and until the layer is known, they take turns.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numba

from retrieval_attn.errors import ConfigError
from retrieval_attn.index.cores import local_ranks, usable_cores

_one_at_a_time = threading.RLock()


def check_threads(threads: int | None) -> None:
    """Raise ConfigError unless `threads` is None (as many as Numba has) or 1 ..

    numba.config.NUMBA_NUM_THREADS.
    """
    most: int = vars(numba.config)["NUMBA_NUM_THREADS"]  # set at import from the environment
    if threads is None:
        return
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= most:
        raise ConfigError(
            f"threads={threads!r} must be None or a whole number from 1 to {most}, the threads Numba has; "
            "set NUMBA_NUM_THREADS before the first import for more"
        )


@contextlib.contextmanager
def kernel_threads(threads: int | None) -> Iterator[None]:
    """Run parallel kernels of the calling thread on `threads` threads inside the block, then restore the
    count.

    None leaves the count alone, or of several ranks on a machine lowers it to this rank's share of the cores
    (`index/cores.py`). Blocks nest. Raises ConfigError for a count that cannot be had.
    """
    check_threads(threads)
    if threads is None and local_ranks()[1] > 1:
        threads = min(numba.get_num_threads(), len(usable_cores()))
    with _one_at_a_time if _layer_is_exclusive() else contextlib.nullcontext():
        before = numba.get_num_threads()
        if threads is not None:
            numba.set_num_threads(threads)
        try:
            yield
        finally:
            numba.set_num_threads(before)


def _layer_is_exclusive() -> bool:
    try:
        return numba.threading_layer() == "workqueue"
    except ValueError:  # no parallel kernel has run yet
        return True
