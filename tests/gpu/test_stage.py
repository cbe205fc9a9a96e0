"""Codes in host memory that are brought a layer ahead: what is named is what codes on the device name.

Triton's own interpreter runs the kernels on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_stage.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from retrieval_attn.gpu.codes import streamer as stage_module
from retrieval_attn.gpu.codes.search import CodeRange, CodeSearch, CodeShape, QuestionSearch
from retrieval_attn.gpu.codes.streamer import TURNS, CodeStreamer, CodeTurns
from retrieval_attn.gpu.codes.table import SharedTables
from tests.gpu.test_code_search import device, made, named, on
from tests.gpu.test_decode_kernels import INTERPRETED

__all__ = ["device"]  # a fixture


class AtOnce:
    """What records, and does it at once."""

    def parallel(self, record: Callable[[], None]) -> None:
        record()

    def after(self, begun: Any) -> None:
        """It was done."""


@pytest.fixture
def staged(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the tensors lie, and the kernel that brings codes runs as those that search do."""
    if device == "cpu" and INTERPRETED:
        from retrieval_attn.gpu.codes import codes_triton as stage_triton

        monkeypatch.setattr(stage_module, "kernels_for", lambda tensor, name: stage_triton)
    return device


class Layers:
    """Searches of a step, each with codes of its own in host memory, and the same with codes on the device."""

    def __init__(self, device: str, sizes: Sequence[int], entries: int, turns: CodeTurns) -> None:
        space, _ = made(64, 16, 900)
        shape, where = CodeShape(16, 40), torch.device(device)
        self.query = torch.randn(entries, 2, 1, 64, generator=torch.Generator().manual_seed(3)).to(device)
        self.tables = SharedTables()
        self.stage = CodeStreamer(turns, self.tables)
        self.codes: list[list[CodeRange]] = []
        self.searches, self.plain = [], CodeSearch(entries, 2, 1, shape, where)
        for number, size in enumerate(sizes):
            keys = made(64, 16, size, number)[1]
            self.codes.append([(on(device, space, keys, on_host=there), size) for there in (True, False)])
            self.searches.append(CodeSearch(entries, 2, 1, shape, where, tables=self.tables))
            assert self.stage.add(self.searches[-1], entries, where) == number

    def bind(self, ranges: Callable[[CodeRange], list[CodeRange | None]], only: Sequence[int] | None = None) -> None:
        for number, search in enumerate(self.searches):
            if only is None or number in only:
                search.bind(ranges(self.codes[number][0]))
                self.stage.moved(number)
        self.stage.settle()
        self.tables.upload()

    def names(self) -> list[list[list[int]]]:
        """Of each layer, as a step goes through them."""
        runtime: Any = AtOnce()
        self.stage.begin_step()
        found = []
        for number, search in enumerate(self.searches):
            self.stage.wait(number, runtime)
            found.append(named(search, self.query))
            self.stage.follow(number, runtime)
        return found

    def expected(self, ranges: Callable[[CodeRange], list[CodeRange | None]]) -> list[list[list[int]]]:
        found = []
        for _, there in self.codes:
            self.plain.bind(ranges(there))
            found.append(named(self.plain, self.query))
        return found


def test_layers_take_turns(staged: str) -> None:
    """Of more layers than have room, of other lengths, again for each step; and where codes are fewer, or none."""
    sizes = [900, 500, 613, 900, 40]
    assert len(sizes) > 2 * TURNS
    layers = Layers(staged, sizes, 1, CodeTurns())
    cases: list[Callable[[CodeRange], list[CodeRange | None]]] = [
        lambda one: [one],
        lambda one: [(one[0], one[1] - 3)],
        lambda one: [None],
        lambda one: [one],
    ]
    for ranges in cases:
        layers.bind(ranges)
        for _ in range(2):
            assert layers.names() == layers.expected(ranges)


def test_rows_over_one_text_share_what_is_brought(staged: str) -> None:
    """And a row of its own has its own, whose codes lie on the device."""
    layers = Layers(staged, [700, 650, 600], 3, CodeTurns())

    def ranges(one: CodeRange) -> list[CodeRange | None]:
        return [one, None, one]

    layers.bind(ranges)
    assert layers.names() == layers.expected(ranges)
    for number, (host, there) in enumerate(layers.codes):
        layers.searches[number].bind([host, there, host])
        layers.stage.moved(number)
        brought = layers.stage._staged[number][1]
        assert brought.find(layers.searches[number]) == -(-host[1] * 16 // 256) * 256
    layers.stage.settle()
    layers.tables.upload()
    assert layers.names() == layers.expected(lambda one: [one, one, one])


def test_memory_grows_under_what_was_bound(staged: str) -> None:
    """One layer has more keys than before, and the others are found where all are now; so are another step's."""
    turns = CodeTurns()
    layers, other = Layers(staged, [300, 900, 300, 300], 1, turns), Layers(staged, [900, 900, 900], 1, turns)

    def some(one: CodeRange) -> list[CodeRange | None]:
        return [(one[0], 200)]

    def all_of(one: CodeRange) -> list[CodeRange | None]:
        return [one]

    layers.bind(some)
    before = layers.stage._memory
    layers.bind(all_of, only=[1])
    assert layers.stage._memory is not before
    expected = layers.expected(some)
    expected[1] = layers.expected(all_of)[1]
    assert layers.names() == expected
    other.bind(all_of)
    assert other.names() == other.expected(all_of)
    assert layers.names() == expected


def test_a_question_brings_them_once(staged: str) -> None:
    """For all blocks of its queries; what is given back is not kept."""
    space, keys = made(64, 16, 800)
    search = QuestionSearch(1, 70, CodeShape(16, 40), torch.device(staged))
    queries = torch.randn(70, 64, generator=torch.Generator().manual_seed(3)).to(staged)
    found = []
    for on_host in (True, False):
        search.bind([(on(staged, space, keys, on_host=on_host), 800)])
        ids = torch.full((70, search.shape.room), 77, dtype=torch.int32, device=staged)
        search.name(queries, ids)
        found.append(ids.tolist())
        assert search._memory.nbytes == (12800 if on_host else 0)
        search.forget()
        assert search._memory.nbytes == 0
    assert found[0] == found[1]
