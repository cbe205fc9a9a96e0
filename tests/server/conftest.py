"""One server for all tests of a process that ask it nothing it would keep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the server needs fastapi: pip install 'retrieval-attn[serve]'")
pytest.importorskip("uvicorn", reason="the server needs uvicorn: pip install 'retrieval-attn[serve]'")
pytest.importorskip("prometheus_client", reason="the server needs prometheus-client")
pytest.importorskip("httpx", reason="tests of the server need httpx")

from tests.server.process import Served, serving


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The bundled model, with a store of its own."""
    with serving("--store", str(tmp_path_factory.mktemp("store")), "--warm-up", "2k") as found:
        yield found
