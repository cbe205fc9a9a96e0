"""What the tests of the evaluation share."""

from __future__ import annotations

from typing import Any

import pytest

from eval.tests.shared import bundled_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The bundled model's. Shared: leave it."""
    return bundled_tokenizer()
