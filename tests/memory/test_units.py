"""Amounts of memory and of tokens: what parses, what is refused by name, how they are shown."""

from __future__ import annotations

import re

import pytest

from retrieval_attn.errors import ConfigError
from retrieval_attn.memory.units import parse_bytes, parse_tokens, show_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        (25769803776, 24 * 2**30),
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        (" 24 gib ", 24 * 2**30),
        ("0.5 KiB", 512),
        ("1.5TB", 1_500_000_000_000),
        ("7B", 7),
    ],
)
def test_sizes_parse(text: int | str, size: int) -> None:
    """GB and GiB differ by 7 %: on a 24 GB card that is 1.6 GiB of plan."""
    assert parse_bytes(text) == size


BAD = ["24", "24G", "GiB", "24 gigs", "-1GiB", "", "0GiB", 0, -5, True, 1.5, None]


@pytest.mark.parametrize("value", BAD)
def test_bad_sizes_are_refused_by_name(value: object) -> None:
    """A unit that is guessed is a plan that is wrong."""
    with pytest.raises(ConfigError, match="gpu_memory") as caught:
        parse_bytes(value, "gpu_memory")  # type: ignore[arg-type]
    assert "24GiB" in str(caught.value)
    assert re.search(re.escape(repr(value)), str(caught.value))


def test_sizes_are_shown_in_the_unit_that_fits() -> None:
    assert [show_bytes(size) for size in (0, 512, 2**16, 3 * 2**19, 2**34, -(2**30))] == [
        "0 B",
        "512 B",
        "64.0 KiB",
        "1.50 MiB",
        "16.00 GiB",
        "-1.00 GiB",
    ]


@pytest.mark.parametrize(
    ("value", "tokens"),
    [(4096, 4096), ("4096", 4096), ("4k", 4096), (" 128K ", 131072), ("1 m", 1 << 20), ("1M", 1 << 20)],
)
def test_tokens_parse(value: int | str, tokens: int) -> None:
    """k counts 1024 tokens, as models' context lengths do."""
    assert parse_tokens(value) == tokens


@pytest.mark.parametrize("value", ["", "k", "4x", "0", "0k", "-4096", "4.5k", "4k8", "٤", 0, -1, True, 1.5, None])
def test_bad_tokens_are_refused_by_name(value: object) -> None:
    """A guessed unit would measure another length than the one asked for."""
    with pytest.raises(ConfigError, match=re.escape(f"--context={value!r} is not a number of tokens")):
        parse_tokens(value, "--context")  # type: ignore[arg-type]
