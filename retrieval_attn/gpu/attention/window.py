"""The static part of a sequence on the device: attention sinks and the recent window (section 3.3).

One buffer per layer, `[free | sinks | tail | free]` along the token axis, batched over the rows of a cache. The tail
begins at a fixed slot and grows to the right; when it is full the owner moves its oldest tokens to the host and calls
`drop_oldest`. A per-row validity mask exists only when some row is padded; without padding no mask is ever built.
A captured graph reads and writes the same buffer (`use`), so nothing here moves it unless it must grow. Forks share a
buffer until they write (copy on write). A prompt that is prefilled moves a window by one concatenation, windows of the
rows of a batch by one gather (`slide_together`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.errors import ShapeError
from retrieval_attn.gpu.attention.flash import attend
from retrieval_attn.gpu.attention.merge import Partial


class WindowPlaces(NamedTuple):
    """Where the buffers of the first row of a window lie: addresses of slot 0 in head 0, bytes from a head to the next
    and from a slot to the next, of keys and of values; and their dtype.
    """

    keys_at: int
    values_at: int
    key_head: int
    value_head: int
    key_slot: int
    value_slot: int
    dtype: torch.dtype


class TensorCopies:
    """Copies of tensors that are done in one call."""

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def add(self, target: Tensor, source: Tensor) -> None:
        """Add a copy between tensors of one shape; neither is changed until `run`."""
        self._targets.append(target)
        self._sources.append(source)

    def run(self) -> None:
        """Do the copies that were added since the last call."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        self._targets, self._sources = [], []


Bring = Callable[[Items[Tensor]], list[Tensor]]
"""Copies tensors to host memory and waits for the copies; see `offload.staging.brought_together`."""


def copy_to_host(windows: Iterable[WindowCache], bring: Bring) -> None:
    """Make the copies that `offload` of windows needs, with one wait; only clones are used from now on.

    bring: returns tensors in page-locked memory. A copy to other memory holds up the threads that launch steps, and
    back from it each tensor waits.
    """
    todo = [window for window in windows if window.lacks_copy]
    buffers = [part for window in todo for part in window.buffers]
    copies = [copy.clone() if copy is own else copy for copy, own in zip(bring(buffers), buffers, strict=True)]
    for number, window in enumerate(todo):
        window.keep_copy(copies[2 * number], copies[2 * number + 1])


class WindowCache:
    """Sink and tail keys and values of one layer on one device.

    Layout (batch, kv_heads, tokens, dim) in the model's dtype. `valid` is (batch, tokens) bool or None when
    every token of every row is real; it covers the used slots. Memory is constant: sinks + tail capacity, whatever the
    context length.
    """

    def __init__(self, key: Tensor, value: Tensor, capacity: int, sinks: int = 0) -> None:
        """Empty cache shaped after `key` (batch, kv_heads, *, head_dim) and `value`, for `capacity` tail tokens.

        sinks: room for sink tokens; more make the buffer grow.
        """
        self.sink_len = 0
        self.tail_len = 0
        self.valid: Tensor | None = None
        self._capacity = capacity
        self._tail = sinks  # slot of the tail's first token
        self._key = _room_for(key, sinks + capacity)
        self._value = _room_for(value, sinks + capacity)
        self._apart: int | None = None  # other windows have these buffers: first slot of the tail in buffers to come
        self._in_graph = False  # a captured graph writes these buffers
        self._places: WindowPlaces | None = None  # of these, once `places` was read
        self._home: torch.device | None = None  # of a window that is offloaded
        self._copies: tuple[Tensor, Tensor] | None = None  # of the buffers, in host memory

    @property
    def batch(self) -> int:
        return self._key.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory reserved."""
        return self._key.nbytes + self._value.nbytes

    @property
    def slots(self) -> int:
        """Slots of `buffers`, or of their copy that the next write makes if other windows share them."""
        return int(self._key.shape[2]) if self._apart is None else self._apart + self._capacity

    @property
    def room(self) -> int:
        """Tokens that can still be appended."""
        return self._capacity - self.tail_len

    @property
    def span(self) -> tuple[int, int]:
        """The used slots [low, high) of `buffers`: sinks, then the tail; the next token goes to slot `high`."""
        return self._tail - self.sink_len, self._tail + self.tail_len

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Keys and values with all their slots, (batch, kv_heads, slots, dim). Write only after `make_room`."""
        return self._key, self._value

    def use(self, key: Tensor, value: Tensor, *, later: TensorCopies | None = None) -> None:
        """Move into these buffers, of the same shapes but for the slots, which must be enough: what is used is copied.

        later: gets the copies, which the caller runs; None: they are done now. The tail keeps its first slot. Raises
        ShapeError for buffers that cannot hold it.
        """
        (low, high), tail = self.span, self._tail if self._apart is None else self._apart
        moved = tail - self._tail
        copies = TensorCopies() if later is None else later
        for mine, given in ((self._key, key), (self._value, value)):
            same = (mine.shape[:2], mine.shape[3], mine.dtype) == (given.shape[:2], given.shape[3], given.dtype)
            if not same or given.shape[2] < high + moved:
                raise ShapeError(
                    f"a window of {tuple(mine.shape)} with {high + moved} used slots cannot move to a buffer of "
                    f"{tuple(given.shape)}."
                )
        for mine, given in ((self._key, key), (self._value, value)):
            copies.add(given[:, :, low + moved : high + moved], mine[:, :, low:high])
        if later is None:
            copies.run()
        self._put(key, value, tail, key.shape[2] - tail)
        self._in_graph = True

    def own(self) -> None:
        """Move out of a graph's buffers into memory of its own."""
        self._put(self._key.clone(), self._value.clone(), self._tail, self._capacity)

    def note_appended(self, count: int) -> None:
        """`count` real tokens were written behind the tail by a caller that knew `span` and `buffers`."""
        if self.valid is not None:
            self.valid = torch.cat([self.valid, self._all_valid(count)], dim=1)
        self.tail_len += count

    def tail(self) -> tuple[Tensor, Tensor]:
        """Views of the tail's keys and values, (batch, kv_heads, tail_len, dim)."""
        span = slice(self._tail, self._tail + self.tail_len)
        return self._key[:, :, span], self._value[:, :, span]

    def append(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Append tokens to the tail. valid: (batch, tokens) bool or None for all real."""
        count = key.shape[2]
        self.make_room(count)
        low, high = self.span
        self._key[:, :, high : high + count] = key
        self._value[:, :, high : high + count] = value
        if valid is not None or self.valid is not None:
            new = valid if valid is not None else self._all_valid(count)
            old = self.valid if self.valid is not None else self._all_valid(high - low)
            self.valid = torch.cat([old, new], dim=1)
        self.tail_len += count

    def align_right(self) -> None:
        """Move the real tokens of each row to the end of the tail, in their order, after the padding.

        For windows without sinks, in which a column is a distance from the newest token.
        """
        if self.valid is None:
            return
        self.make_room(0)
        order = self.valid.to(torch.uint8).argsort(dim=1, stable=True)
        used = slice(*self.span)
        for buffer in self.buffers:
            mine = buffer[:, :, used]
            mine.copy_(mine.gather(2, order[:, None, :, None].expand_as(mine)))
        self.valid = self.valid.gather(1, order)

    def slide(self, count: int, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Forget the `count` oldest tokens of the tail and append others, in one operation if possible."""
        new, padded = key.shape[2], valid is not None or self.valid is not None
        fits = self.tail_len - count + new <= self._capacity
        if padded or self._in_graph or not fits or (self._apart is None and not count):
            self.drop_oldest(count)
            self.append(key, value, valid)
            return
        self._require_dropped(count)
        tail = self._tail if self._apart is None else self._apart
        self._put(self._slid(self._key, key, count, tail), self._slid(self._value, value, count, tail), tail)
        self.tail_len += new - count

    def _slid(self, buffer: Tensor, new: Tensor, dropped: int, tail: int) -> Tensor:
        """Return keys or values for `slide`: free slots have any contents."""
        (low, high), first = self.span, self._tail
        kept = [slice(low, high)] if not dropped else [slice(low, first), slice(first + dropped, high)]
        used = high - first - dropped + new.shape[2]
        free = tail - self.sink_len, self._capacity - used
        spare = buffer if buffer.shape[2] >= max(free) else _room_for(buffer, max(free), buffer.device)
        before, behind = ([spare[:, :, :count]] if count else [] for count in free)
        used_parts = (buffer[:, :, span] for span in kept if span.stop > span.start)
        return torch.cat([*before, *used_parts, new, *behind], dim=2)

    def drop_newest_of(self, counts: Items[int], columns: int) -> None:
        """Forget the `counts` newest tokens of each row, and columns of padding, `columns` in all.

        The rows are aligned, see `align_right`, before and afterwards.
        """
        valid = self._all_valid(self.tail_len) if self.valid is None else self.valid.clone()
        for row, count in enumerate(counts):
            valid[row, valid.shape[1] - count :] = False
        self.valid = valid
        self.align_right()
        self.drop_oldest(columns)

    def shrink(self, capacity: int) -> None:
        """Release the memory of the buffer beyond room for `capacity` tail tokens.

        Raises ShapeError if there are more.
        """
        if self.tail_len > capacity:
            raise ShapeError(
                f"a window of {self.tail_len} tokens cannot shrink to {capacity}; drop its oldest tokens first."
            )
        if self._apart is not None:
            self._capacity = min(self._capacity, capacity)
        elif self._capacity > capacity:
            self._resize(self._tail, capacity)

    def drop_oldest(self, count: int) -> None:
        """Forget the `count` oldest tokens of the tail (they are on the host by now)."""
        self._require_dropped(count)
        if count == 0:
            return
        self.make_room(0)
        high = self.span[1]
        keep, target = slice(self._tail + count, high), slice(self._tail, high - count)
        for buffer in self.buffers:
            _move(buffer[:, :, keep], buffer[:, :, target])
        if self.valid is not None:
            self.valid = torch.cat([self.valid[:, : self.sink_len], self.valid[:, self.sink_len + count :]], dim=1)
        self.tail_len -= count

    def _require_dropped(self, count: int) -> None:
        if count < 0 or count > self.tail_len:
            raise ShapeError(f"count must be from 0 to the {self.tail_len} tokens of the window, got {count} to drop.")

    def truncate(self, count: int) -> None:
        """Forget the `count` newest tokens of the tail."""
        if count < 0 or count > self.tail_len:
            raise ShapeError(
                f"count must be from 0 to the {self.tail_len} tokens of the window, got {count} to remove."
            )
        self.tail_len -= count
        if self.valid is not None:
            self.valid = self.valid[:, : self.sink_len + self.tail_len]

    def set_sinks(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Replace the sinks by (batch, kv_heads, sinks, dim) tensors; the tail stays."""
        tail_valid = None if self.valid is None else self.valid[:, self.sink_len :]
        self.make_room(0)
        if key.shape[2] > self._tail:
            self._resize(key.shape[2], self._capacity)
        self.sink_len = key.shape[2]
        low = self.span[0]
        self._key[:, :, low : self._tail] = key
        self._value[:, :, low : self._tail] = value
        if valid is None and tail_valid is None:
            self.valid = None
            return
        sink_valid = valid if valid is not None else self._all_valid(self.sink_len)
        rest = tail_valid if tail_valid is not None else self._all_valid(self.tail_len)
        self.valid = torch.cat([sink_valid, rest], dim=1)

    def select(self, rows: Tensor) -> None:
        """Keep `rows` (int64 indices, repeats allowed) of the batch, in that order."""
        self.make_room(0)
        rows = rows.to(self._key.device)
        self._put(self._key.index_select(0, rows), self._value.index_select(0, rows), self._tail)
        if self.valid is not None:
            self.valid = self.valid.index_select(0, rows)

    def attend(self, query: Tensor, *, scale: float, softcap: float | None, reach: int | None = None) -> Partial:
        """Attention over sinks and tail. The last query.shape[2] tail tokens are the queries' own, causally.

        query: (batch, q_heads, queries, head_dim). reach: a query sees only keys less than `reach` tokens
        behind it (sliding-window layers, which have no sinks). No valid key for a query: out 0, lse -inf.
        """
        used = slice(*self.span)
        key, value = self._key[:, :, used], self._value[:, :, used]
        tokens = self.sink_len + self.tail_len
        if self.valid is None and reach is not None and query.shape[2] == 1 and not self.sink_len:
            key, value = key[:, :, -reach:], value[:, :, -reach:]  # all that the query sees: no mask
            return attend(query, key, value, scale=scale, softcap=softcap)
        if self.valid is None and (reach is None or tokens <= reach):
            # the queries' own tokens are the last: kernels know that without a mask
            return attend(query, key, value, scale=scale, causal=True, softcap=softcap)
        mask = _visible(query.shape[2], tokens, reach, self.valid, query.device)
        return attend(query, key, value, scale=scale, mask=mask, softcap=softcap)

    def clone(self, capacity: int = 0, sinks: int = 0) -> WindowCache:
        """An independent copy; used by forks. It has room for at least `capacity` tail tokens and `sinks` sinks.

        Both share the buffers until they write. The copy of an offloaded window is on the device.
        """
        other = object.__new__(WindowCache)
        other.__dict__.update(self.__dict__)
        tail = self._tail if self._apart is None else self._apart
        size = max(tail, sinks), max(self._capacity, capacity)
        if self._in_graph or self._home is not None:
            other._resize(*size)
        else:
            self._apart, (other._apart, other._capacity) = tail, size
        other._home = other._copies = None
        return other

    @property
    def lacks_copy(self) -> bool:
        """Whether `offload` would have nothing to put in place of the buffers."""
        return self._home is None and self._copies is None

    def keep_copy(self, key: Tensor, value: Tensor) -> None:
        """Take the copies of the buffers in host memory, see `copy_to_host`."""
        self._copies = key, value

    def offload(self) -> int:
        """Put the copies in place of the buffers; only clones are used from now on. Returns the freed bytes."""
        if self._home is not None:
            return 0
        assert self._copies is not None, "copy_to_host comes first"
        self._home, freed = self._key.device, self.nbytes
        (self._key, self._value), self._places, self._copies = self._copies, None, None
        return freed

    def _all_valid(self, tokens: int) -> Tensor:
        return torch.ones(self.batch, tokens, dtype=torch.bool, device=self._key.device)

    def _resize(self, tail: int, capacity: int) -> None:
        """Move into new memory, in which the tail begins at a slot and has room for `capacity` tokens."""
        low, high, moved = *self.span, tail - self._tail
        key, value = (_room_for(part, tail + capacity, self._home) for part in self.buffers)
        for new, old in ((key, self._key), (value, self._value)):
            there = old.to(new.device, non_blocking=True)  # whole: a part of it is not one piece of memory
            new[:, :, low + moved : high + moved] = there[:, :, low:high]
        self._put(key, value, tail, capacity)

    def _put(self, key: Tensor, value: Tensor, tail: int, capacity: int | None = None) -> None:
        """Take buffers that no other window has, with the tail from slot `tail` on. capacity: None: as before."""
        self._key, self._value, self._places = key, value, None
        self._tail, self._capacity = tail, self._capacity if capacity is None else capacity
        self._apart, self._in_graph = None, False

    def make_room(self, count: int) -> None:
        """Prepare the buffers for a write: grow if `count` tokens cannot be appended, copy what other windows share."""
        if count > self.room or self._apart is not None:
            tail = self._tail if self._apart is None else self._apart
            self._resize(tail, max(self._capacity, self.tail_len + count))

    def _layout(self) -> tuple[int, int, int, int, int]:
        """Return sinks, first slot and tokens of the tail, and the first slot and all slots after the next write."""
        return self.sink_len, self._tail, self.tail_len, self._tail if self._apart is None else self._apart, self.slots

    def places(self) -> WindowPlaces:
        """Return the addresses of `buffers`, cached: torch takes as long for a number as a short kernel runs."""
        if self._places is None:
            (key, value), size = self.buffers, self.buffers[0].element_size()
            (_, key_head, key_slot, _), (_, value_head, value_slot, _) = key.stride(), value.stride()
            strides = size * key_head, size * value_head, size * key_slot, size * value_slot
            self._places = WindowPlaces(key.data_ptr(), value.data_ptr(), *strides, key.dtype)
        return self._places

    def keep_no_room(self) -> None:
        """Shrink the buffers to the used tokens: only clones append later, and they request their own room."""
        self._resize(self.sink_len, self.tail_len)


class Slide(NamedTuple):
    """A window of one row whose `dropped` oldest tail tokens are replaced by new tokens [start, stop) of all rows'."""

    window: WindowCache
    dropped: int
    start: int
    stop: int

    @property
    def is_plain(self) -> bool:
        """Whether `slide_together` serves it: no padding, no graph, and enough room."""
        window = self.window
        used = window.tail_len - self.dropped + self.stop - self.start
        return window.valid is None and not window._in_graph and window._home is None and used <= window._capacity


def slide_together(
    slides: Items[Slide], key: Tensor, value: Tensor, index_of: Callable[[Hashable, Callable[[], np.ndarray]], Tensor]
) -> None:
    """Slide the windows of several rows by one gather of keys and one of values: `WindowCache.slide` for each.

    key, value: (1, kv_heads, tokens, dim), the new tokens of all rows. index_of(layout, make): returns `make()`, int64,
    on the device; it may keep the index of a layout, which is the same in every layer. Slides are `Slide.is_plain`.
    """
    windows = [one.window for one in slides]
    sources = list({id(window._key): window for window in windows}.values())
    places = {id(window._key): number for number, window in enumerate(sources)}
    layout = (
        key.shape[1],
        (*(window._key.shape[2] for window in sources), key.shape[2]),
        tuple(
            (places[id(window._key)], *window._layout(), *one[1:]) for window, one in zip(windows, slides, strict=True)
        ),
    )
    index = index_of(layout, lambda: _slid_places(*layout))
    sizes = [window.slots for window in windows]
    found = []
    for number, new in enumerate((key, value)):
        pool = torch.cat([*(window.buffers[number] for window in sources), new], dim=2)
        # along the first dimension of two: along a middle one a CPU copies an index at a time
        slots = pool.view(-1, pool.shape[3]).index_select(0, index)
        found.append(slots.view(1, pool.shape[1], -1, pool.shape[3]).split(sizes, dim=2))
    for one, own_key, own_value in zip(slides, *found, strict=True):
        window = one.window
        window._put(own_key, own_value, window._tail if window._apart is None else window._apart)
        window.tail_len += one.stop - one.start - one.dropped


def _slid_places(heads: int, tokens: Items[int], rows: Items[tuple[int, ...]]) -> np.ndarray:
    """Return which token of the sources and the new ones each slot of the windows of `slide_together` gets.

    (heads * slots of all windows,) int64, counted in (heads, tokens of all). tokens: slots of each source, and the new
    tokens. rows: number of the source, `WindowCache._layout`, and the numbers of the `Slide`.
    """
    firsts = np.cumsum([0, *tokens])
    found = []
    for source, sinks, tail, tail_len, new_tail, size, dropped, start, stop in rows:
        places = np.zeros(size, np.int64)  # free slots have any contents
        places[new_tail - sinks : new_tail] = np.arange(tail - sinks, tail) + firsts[source]
        kept, end = tail_len - dropped, new_tail + tail_len - dropped
        places[new_tail:end] = np.arange(tail + dropped, tail + dropped + kept) + firsts[source]
        places[end : end + stop - start] = np.arange(start, stop) + firsts[-2]
        found.append(places)
    return (firsts[-1] * np.arange(heads)[:, None] + np.concatenate(found)).reshape(-1)


def sinks_of(window: WindowCache) -> tuple[Tensor, Tensor]:
    """Views of a window's sinks: keys and values, (batch, kv_heads, sink_len, dim)."""
    low = window.span[0]
    key, value = window.buffers
    return key[:, :, low : low + window.sink_len], value[:, :, low : low + window.sink_len]


def _move(source: Tensor, target: Tensor) -> None:
    """Copy (batch, kv_heads, tokens, dim) to a target that may overlap with it."""
    contiguous = type(source) is Tensor and source.stride()[2:] == (source.shape[3], 1)  # a FakeTensor has no memory
    if source.device.type != "cpu" or not contiguous:
        target.copy_(source.clone())
        return
    nbytes = source.shape[2] * source.shape[3] * source.element_size()
    for row in range(source.shape[0]):
        for head in range(source.shape[1]):
            ctypes.memmove(target[row, head].data_ptr(), source[row, head].data_ptr(), nbytes)


def _room_for(like: Tensor, tokens: int, device: torch.device | None = None) -> Tensor:
    """Uninitialised memory for `tokens` tokens of the shape and dtype of `like`. device: None: that of `like`."""
    return like.new_empty(like.shape[0], like.shape[1], tokens, like.shape[3], device=device)


def _visible(queries: int, tokens: int, reach: int | None, valid: Tensor | None, device: torch.device) -> Tensor | None:
    """(1 or batch, 1, queries, tokens) bool, or None when every query sees every token. valid: (batch, tokens)."""
    mask: Tensor | None = None
    if queries > 1 or (reach is not None and tokens > reach):
        # Token t is visible to query i when t <= position of i; sinks lie before every query.
        position = torch.arange(tokens - queries, tokens, device=device)[:, None]
        token = torch.arange(tokens, device=device)
        mask = token <= position
        if reach is not None:
            mask = mask & (token > position - reach)
        mask = mask[None, None]
    if valid is not None:
        row = valid[:, None, None, :]
        mask = row if mask is None else mask & row
    return mask
