"""What the tests of the evaluation share."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from eval.tests.shared import bundled_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The bundled model's. Shared: leave it."""
    return bundled_tokenizer()


@pytest.fixture
def modules_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `bench serve` collects, it collects among what the test makes: to visit all modules at each of its
    collections takes half of the time of its tests, and would slow down those of later tests in this process.
    """
    gc.freeze()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
