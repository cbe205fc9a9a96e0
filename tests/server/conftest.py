"""One server for all tests of a process that ask it nothing it would keep; skips where its packages are missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server.process import Served

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "python_multipart", "httpx")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


class SkippedModule(pytest.Module):
    """A file of tests that is not imported."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Nothing; says why."""
        pytest.skip(f"needs {', '.join(MISSING)}: pip install 'retrieval-attn[serve,dev]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Files of this folder import what may be missing."""
    return SkippedModule.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The bundled model, with a store of its own."""
    from tests.server.process import serving

    options = ("--store", str(tmp_path_factory.mktemp("store")), "--warm-up", "2k")
    with serving(*options, preloaded=True) as found:
        yield found
