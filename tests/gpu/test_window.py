"""The window's buffer: sinks before a tail that begins at a fixed slot, moved only where it must grow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retrieval_attn.errors import ShapeError
from retrieval_attn.gpu.attention.window import WindowCache


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
    assert are_right(other) and are_right(window) and other.places().keys_at != window.places().keys_at
    window.select(torch.tensor([1, 0, 1]))
    assert are_right(window)
