"""The window's buffer: sinks before a tail that begins at a fixed slot, moved only where it must grow."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable

import numpy as np
import pytest
import torch
from torch import Tensor

from retrieval_attn.errors import ShapeError
from retrieval_attn.gpu.attention.window import Slide, WindowCache, slide_together


def tokens(count: int, first: int = 0) -> Tensor:
    """(2, 1, count, 3) whose numbers tell row and token."""
    return (torch.arange(first, first + count) + 100.0 * torch.arange(2)[:, None])[:, None, :, None].expand(2, 1, -1, 3)


def held(window: WindowCache) -> list[int]:
    """Tokens of row 0 in the used slots."""
    low, high = window.span
    return [int(number) for number in window.buffers[0][0, 0, low:high, 0]]


def test_sinks_and_tail_stay_in_one_buffer() -> None:
    """Sinks come and grow inside their room; the tail keeps its slots, so a graph's buffer stays where it is."""
    window = WindowCache(tokens(1), tokens(1), capacity=4, sinks=3)
    before = window.buffers[0].data_ptr()
    window.append(tokens(4, 10), tokens(4, 10), None)
    assert window.span == (3, 7) and window.room == 0
    for sinks in (1, 3, 2):
        window.set_sinks(tokens(sinks), tokens(sinks), None)
        assert held(window) == [*range(sinks), 10, 11, 12, 13] and window.span == (3 - sinks, 7)
    window.drop_oldest(3)
    assert held(window) == [0, 1, 13] and window.room == 3
    window.append(tokens(2, 14), tokens(2, 14), None)
    window.truncate(1)
    assert held(window) == [0, 1, 13, 14] and window.buffers[0].data_ptr() == before
    window.set_sinks(tokens(5), tokens(5), None)  # more than there was room for
    assert held(window) == [0, 1, 2, 3, 4, 13, 14] and window.span == (0, 7)


def test_validity_follows_the_used_slots() -> None:
    window = WindowCache(tokens(1), tokens(1), capacity=4, sinks=2)
    window.append(tokens(2, 10), tokens(2, 10), torch.tensor([[True, False], [True, True]]))
    window.set_sinks(tokens(2), tokens(2), torch.tensor([[True, True], [True, False]]))
    window.note_appended(1)
    assert window.valid is not None and window.valid.tolist() == [
        [True, True, True, False, True],
        [True, False] + [True] * 3,
    ]
    window.drop_oldest(1)
    assert window.valid.tolist() == [[True, True, False, True], [True, False, True, True]]


def test_a_window_moves_into_buffers_and_out_again() -> None:
    """What is used is copied to the same slots; what a graph writes there is the window's, until it owns its memory."""
    window = WindowCache(tokens(1), tokens(1), capacity=2, sinks=2)
    window.append(tokens(2, 10), tokens(2, 10), None)
    window.set_sinks(tokens(1), tokens(1), None)
    key, value = torch.zeros(2, 1, 9, 3), torch.zeros(2, 1, 9, 3)
    window.use(key, value)
    assert window.room == 5 and key[0, 0, :, 0].tolist() == [0, 0, 10, 11, 0, 0, 0, 0, 0]
    key[:, :, window.span[1]] = 12
    window.note_appended(1)
    assert held(window) == [0, 10, 11, 12]
    window.own()
    key.zero_()
    assert held(window) == [0, 10, 11, 12] and window.room == 4
    for shape in ((2, 1, 4, 3), (2, 2, 9, 3), (1, 1, 9, 3), (2, 1, 9, 4)):
        with pytest.raises(ShapeError, match="used slots cannot move to"):
            window.use(torch.zeros(shape), torch.zeros(shape))


def test_places_are_those_of_the_buffers_that_there_are() -> None:
    """Whatever moves the window: an address of buffers that are gone would be written to."""
    window = WindowCache(tokens(1), tokens(1)[..., :1].expand(-1, -1, -1, 5), capacity=4, sinks=3)

    def are_right(one: WindowCache) -> bool:
        key, value = one.buffers
        heads, slots = ([4 * part.stride(axis) for part in (key, value)] for axis in (1, 2))
        return one.places() == (key.data_ptr(), value.data_ptr(), *heads, *slots, key.dtype)

    assert are_right(window) and window.places() is window.places()
    given = [part.new_empty(2, 1, 9, part.shape[3]) for part in window.buffers]
    window.use(*given)
    assert are_right(window) and window.places().keys_at == given[0].data_ptr()
    window.own()
    assert are_right(window) and window.places().keys_at != given[0].data_ptr()
    window.make_room(window.room)
    held_at = window.places().keys_at
    assert are_right(window)
    window.make_room(window.room + 1)
    assert are_right(window) and window.places().keys_at != held_at
    other = window.clone()
    other.make_room(0)
    assert are_right(other) and are_right(window) and other.places().keys_at != window.places().keys_at
    window.select(torch.tensor([1, 0, 1]))
    assert are_right(window)


class Copied:
    """The tokens that a window should hold, and the window."""

    def __init__(self, window: WindowCache, sinks: list[int], tail: list[int]) -> None:
        self.window, self.sinks, self.tail = window, sinks, tail

    def is_right(self) -> bool:
        low, high = self.window.span
        expected = self.sinks + self.tail
        numbers = torch.tensor(expected, dtype=torch.float32) + 100_000.0 * torch.arange(2)[:, None]
        parts = [part[:, 0, low:high, 0] for part in self.window.buffers]
        room = self.window.slots - self.window.span[1]
        return all(torch.equal(part, numbers) for part in parts) and (self.window._apart is not None or room >= 0)


@pytest.mark.parametrize("seed", range(30))
def test_forks_share_buffers_until_they_write(seed: int) -> None:
    """Random appends, moves, crops, sinks, graphs and forks of forks: each window has its own tokens and no others."""
    draw, first = random.Random(seed), iter(range(1, 100_000))

    def new(count: int) -> tuple[list[int], Tensor]:
        numbers = [next(first) for _ in range(count)]
        found = torch.tensor(numbers, dtype=torch.float32) + 100_000.0 * torch.arange(2)[:, None]
        return numbers, found[:, None, :, None].expand(2, 1, -1, 3)

    like = new(1)[1]
    held = [Copied(WindowCache(like, like, capacity=8, sinks=3), [], [])]
    for _ in range(60):
        one = draw.choice(held)
        window, count = one.window, draw.randrange(6)
        kind = draw.choice(
            ["append", "drop", "slide", "truncate", "sinks", "fork", "graph", "pack", "shrink", "column"]
        )
        dropped = min(count, len(one.tail))
        if kind == "append":
            numbers, tokens = new(count)
            window.append(tokens, tokens, None)
            one.tail = one.tail + numbers
        elif kind == "drop":
            window.drop_oldest(dropped)
            one.tail = one.tail[dropped:]
        elif kind == "slide":
            numbers, tokens = new(draw.randrange(1, 6))
            window.slide(dropped, tokens, tokens, None)
            one.tail = one.tail[dropped:] + numbers
        elif kind == "truncate":
            window.truncate(dropped)
            one.tail = one.tail[: len(one.tail) - dropped]
        elif kind == "sinks":
            one.sinks, tokens = new(count)
            window.set_sinks(tokens, tokens, None)
        elif kind == "fork":
            held.append(Copied(window.clone(draw.choice([0, 12]), draw.choice([0, 5])), one.sinks, one.tail))
        elif kind == "graph":
            slots = window.slots + draw.randrange(4)
            window.use(*(torch.full((2, 1, slots, 3), torch.nan) for _ in range(2)))
            if draw.random() < 0.5:
                window.own()
        elif kind == "pack":
            window.keep_no_room()
        elif kind == "shrink":
            window.shrink(len(one.tail) + count)
        else:
            window.make_room(1)
            numbers, tokens = new(1)
            for part in window.buffers:
                part[:, :, window.span[1]] = tokens[:, :, 0]
            window.note_appended(1)
            one.tail = one.tail + numbers
        assert all(other.is_right() for other in held), kind


def test_forks_copy_nothing() -> None:
    """A fork has its parent's buffers; a graph's buffers are copied at once, because replays write them."""
    window = WindowCache(tokens(1), tokens(1), capacity=4, sinks=2)
    window.append(tokens(3, 10), tokens(3, 10), None)
    fork = window.clone(6)
    assert fork.buffers[0] is window.buffers[0] and (fork.room, window.room, fork.slots) == (3, 1, 8)
    window.use(torch.zeros(2, 1, 9, 3), torch.zeros(2, 1, 9, 3))
    assert window.clone().buffers[0] is not window.buffers[0]


@pytest.mark.parametrize("seed", range(10))
def test_windows_slide_together_as_alone(seed: int) -> None:
    """Forks of two windows, of other numbers of new tokens: the used slots have the bits of each alone."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(1, 2, count, 4, generator=generator), torch.randn(1, 2, count, 6, generator=generator)

    parents = []
    for _ in range(2):
        parent = WindowCache(*normal(1), capacity=16, sinks=3)
        parent.append(*normal(draw.randrange(6, 12)), None)
        parent.set_sinks(*normal(draw.randrange(4)), None)
        if draw.random() < 0.5:
            parent.keep_no_room()
        parents.append(parent)
    key, value = normal(30)
    pairs, slides, start = [], [], 0
    for _ in range(5):
        parent, count = draw.choice(parents), draw.randrange(1, 6)
        pairs.append((parent.clone(16, 3), parent.clone(16, 3)))
        slides.append(Slide(pairs[-1][0], draw.randrange(6), start, start + count))
        start += count + draw.randrange(2)
    made: list[Hashable] = []

    def index_of(layout: Hashable, make: Callable[[], np.ndarray]) -> Tensor:
        made.append(layout)
        return torch.from_numpy(make())

    assert all(one.is_plain for one in slides)
    slide_together(slides, key, value, index_of)
    assert len(made) == 1
    for (together, alone), one in zip(pairs, slides, strict=True):
        alone.slide(one.dropped, key[:, :, one.start : one.stop], value[:, :, one.start : one.stop], None)
        assert (together.span, together.slots, together.room) == (alone.span, alone.slots, alone.room)
        used = slice(*alone.span)
        for mine, other in zip(together.buffers, alone.buffers, strict=True):
            assert torch.equal(mine[:, :, used], other[:, :, used])
        together.append(key[:, :, :1], value[:, :, :1], None)
