"""Cores are divided among the ranks of one machine, and left alone otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from retrieval_attn.index import threads as cores
from retrieval_attn.index.threads import kernel_threads


def test_no_launcher_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert cores.local_ranks() == (0, 1)
    assert cores.usable_cores() == sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "8"}, (1, 2)),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        ({"LOCAL_RANK": "1"}, (0, 1)),
        ({"LOCAL_RANK": "x", "WORLD_SIZE": "2"}, (0, 1)),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, (0, 1)),
        ({"WORLD_SIZE": "2"}, (0, 1)),
    ],
)
def test_ranks_of_the_environment(environment: dict[str, str], expected: tuple[int, int]) -> None:
    """What does not fit together counts as no launcher."""
    assert cores.local_ranks(environment) == expected


@pytest.fixture
def flat_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose topology is not known; the folder to describe one in."""
    monkeypatch.setattr(cores, "TOPOLOGY", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("count", "ranks"), [(16, 2), (32, 2), (7, 2), (5, 4), (64, 8)])
def test_shares_are_disjoint_and_leave_nothing(flat_machine: Path, count: int, ranks: int) -> None:
    shares = [cores.share(range(count), count, rank, ranks) for rank in range(ranks)]
    assert sorted(core for one in shares for core in one) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_ranks_than_cores_get_one_each(flat_machine: Path) -> None:
    assert [cores.share([4, 5], 2, rank, 4) for rank in range(4)] == [[4], [4], [5], [5]]


def test_what_the_launcher_bound_stays_and_is_divided(flat_machine: Path) -> None:
    """Half of the launcher's cores for each of two ranks; eight ranks on two sockets of 16, four bound to each."""
    assert cores.share(range(8), 16, 0, 2) == list(range(8))
    assert cores.share(range(8, 16), 16, 1, 2) == list(range(8, 16))
    first = [cores.share(range(16), 32, rank, 8) for rank in range(4)]
    second = [cores.share(range(16, 32), 32, rank, 8) for rank in range(4, 8)]
    assert sorted(core for one in first + second for core in one) == list(range(32))


def test_threads_of_one_physical_core_stay_together(flat_machine: Path) -> None:
    """Cores n and n + 4 are threads of one physical core, two sockets of two physical cores: no rank shares either."""
    for core in range(8):
        folder = flat_machine / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core % 4 // 2}\n")
        (folder / "core_id").write_text(f"{core % 2}\n")
    assert cores.share(range(8), 8, 0, 2) == [0, 1, 4, 5]
    assert cores.share(range(8), 8, 1, 2) == [2, 3, 6, 7]


def test_kernels_of_a_rank_take_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also inside a block that asks for more; a count that somebody gave is kept."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(os.sched_getaffinity(0))))
    before = numba.get_num_threads()
    with kernel_threads(None):
        assert numba.get_num_threads() == 1
    with kernel_threads(before):
        assert numba.get_num_threads() == before
    assert numba.get_num_threads() == before


def test_two_children_of_one_launcher_take_different_cores() -> None:
    """The affinity of the real parent process decides: nobody has bound the children, so they divide."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    code = f"import runpy; print(*runpy.run_path({cores.__file__!r})['usable_cores']())"  # quick: nothing else
    found = []
    for rank in range(2):
        ours = {**os.environ, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
        done = subprocess.run([sys.executable, "-c", code], env=ours, capture_output=True, text=True, check=True)
        found.append({int(core) for core in done.stdout.split()})
    assert not found[0] & found[1]
    assert found[0] | found[1] == os.sched_getaffinity(0)
