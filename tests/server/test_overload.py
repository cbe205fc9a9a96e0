"""What `tools.server_overload` looks at, and a short run of it against a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import serving
from tools.http_load import Heard
from tools.server_overload import Asked, Look, Phase, Plan, grown, measured

FULL = b'{"error":{"code":"queue_full"}}'
END = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'
ASKED = Asked({"stream": True}, None, lambda text: None)


def heard(status: int, retry_after: str | None = None, body: bytes = END) -> Heard:
    return Heard(status, retry_after, 0.5, 1.0, body)


@pytest.mark.parametrize(
    ("right", "one"),
    [
        (True, heard(200)),
        (True, heard(503, "3", FULL)),
        (True, heard(0)),
        (False, heard(503, None, FULL)),
        (False, heard(503, "0", FULL)),
        (False, heard(503, "soon", FULL)),
        (False, heard(503, "5", b'{"error":{"code":"engine_lost"}}')),
        (False, heard(200, None, END.replace(b"[DONE]", b""))),
        (False, heard(200, None, b'data: {"error": {}}\n\n' + END)),
        (False, heard(500)),
        (False, heard(-1)),
    ],
)
def test_what_may_come(right: bool, one: Heard) -> None:
    phase = Phase()
    phase.add(0.0, 0.0, ASKED, one)
    assert phase.counts["wrong"] == (not right) and len(phase.outcomes) == 1
    assert phase.ended == (one.status in (0, 200))


def test_what_grows_is_found() -> None:
    flat = [Look(10 << 30, 12, 20 + number % 3, 100, 1 << 30) for number in range(60)]
    assert not grown(flat)
    assert not grown([look._replace(rss=look.rss * (1 + min(n, 12))) for n, look in enumerate(flat)])  # it fills
    for name, step in (("rss", 4 << 20), ("threads", 0.1), ("files", 1), ("nodes", 3), ("tree_bytes", 1 << 20)):
        leaks = [look._replace(**{name: getattr(look, name) + step * n}) for n, look in enumerate(flat)]
        (problem,) = grown(leaks)
        assert problem.startswith(name)


@pytest.mark.slow
def test_a_server_refuses_what_is_too_much_for_it(tmp_path: Path) -> None:
    """Many times what a server can do, for some seconds: too few for percentiles and memory, which an hour shows."""
    options = (
        "--store",
        str(tmp_path),
        "--warm-up",
        "0",
        "--queue-timeout",
        "1",
        "--max-queue",
        "8",
        "--max-num-seqs",
        "4",
    )
    plan = Plan(
        minutes=0.05, times=10.0, capacity=4.0, calm_minutes=0.01, documents=1, new_tokens=600,
        save=tmp_path / "saved.json",
    )  # fmt: skip
    with serving(*options, preloaded=True) as served:
        numbers: dict[str, Any]
        numbers, problems = asyncio.run(measured(served, plan))
    assert not [problem for problem in problems if not problem.startswith(("p99 ", *Look._fields))]
    over = numbers["over"]
    assert over["wrong"] == 0 and over["refused"] > 30 and over["answered"] > 0
    assert sum(numbers["retry_after"].values()) == over["refused"]
    assert numbers["times_of_what_ended"] > 2 and plan.save is not None and plan.save.stat().st_size > 500
