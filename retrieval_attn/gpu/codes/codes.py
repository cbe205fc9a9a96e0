"""Codes of one head's keys in a device's memory: written from keys as they come, scanned as a whole.

What a code is, `index/kernels/key_codes.py` says; the numbers here are the same. `gpu/codes/search.py` scans
the codes of all heads of a step; `DeviceCodes.find` is the plain PyTorch way, where Triton does not run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.gpu.decode.kernels import kernels_for

ROWS_AT_ONCE = 1 << 15
"""Keys that PyTorch codes, or scans, at once: their float32 numbers must be few against a layer's keys."""
ALIGNED = 16
"""Bytes that a kernel loads at once: codes of a head begin on a multiple, and capacities are multiples."""
SIGN = 128
"""A byte's highest bit, see `key_codes.SIGN`."""
MOST_VARIANCE = 2.0
"""Of a logit, what codes lack of it: where it is larger, few keys make a sum of exponentials, and its mean tells
nothing of it."""
_launching = threading.Lock()


class DeviceSpace(NamedTuple):
    """`CodeSpace` on the device: query_side (query_projection), key_side (key_projection), shift and estimate; how many
    numbers have 8, 4 and 2 bits.
    """

    query_projection: Tensor
    key_projection: Tensor
    shift: Tensor
    estimate: Tensor
    num_8bit: int
    num_4bit: int
    num_2bit: int

    @property
    def rank(self) -> int:
        """How many numbers are stored."""
        return self.num_8bit + self.num_4bit + self.num_2bit


class DeviceCodes:
    """See the module. codes: (capacity, key_bytes) uint8, of which the first `length` are written.

    finer: codes of the same keys in more bytes, in host memory that the device can read; None: there are none. on_host:
    these lie there, too.
    """

    on_host = False

    def __init__(self, space: DeviceSpace, codes: Tensor, finer: DeviceCodes | None = None) -> None:
        """codes: memory to begin with, any contents; more is taken when keys outgrow it."""
        self.space, self.codes, self.finer, self.length = space, codes, finer, 0

    @property
    def device(self) -> torch.device:
        """Device that scans the codes, wherever they are stored."""
        return self.space.shift.device

    def add(self, keys: Tensor) -> bool:
        """Code keys (n, head_dim) of any floating dtype behind the others. False, and nothing done: not all finite."""
        return add_to_heads([self], [keys])

    def write(self, keys: Tensor, bad: Tensor) -> None:
        """Launch the coding of keys (n, head_dim) behind the others, which `hold` counts. bad: see `write_codes`."""
        stop = self.length + len(keys)
        if stop > len(self.codes):
            codes = self._room(capacity_for(stop + stop // 16))
            codes[: self.length] = self.codes[: self.length]
            if self.codes.is_cuda:  # the step of another sequence may read them now
                self.codes.record_stream(torch.cuda.default_stream(self.codes.device))
            self.codes = codes
        if len(keys):
            write_codes(self.space, keys, self.codes[self.length : stop], bad)
        if self.finer is not None:
            self.finer.write(keys, bad)

    def hold(self, length: int) -> None:
        """The codes of the first `length` keys count, of all that are written."""
        self.length = length
        if self.finer is not None:
            self.finer.hold(length)

    def _room(self, tokens: int) -> Tensor:
        """Memory for the codes of `tokens` keys."""
        return self.codes.new_empty(tokens, self.codes.shape[1])

    def behind(self, first: int) -> DeviceCodes:
        """The codes from `first` on, in the same memory, as they are now; nothing may be added to them."""
        codes = DeviceCodes(self.space, self.codes[first:], None if self.finer is None else self.finer.behind(first))
        codes.length = self.length - first
        return codes

    def find(self, queries: Tensor, count: int, stop: int) -> Tensor:
        """int32 (m, count): the ids below `stop` whose codes promise queries (m, head_dim) float32 most.

        All -1 for a query whose scores are not finite. count <= stop <= length.
        """
        scores = torch.cat(
            [code_scores(self.space, some, queries) for some in self.codes[:stop].split(ROWS_AT_ONCE)], 1
        )
        ids = scores.nan_to_num(-torch.inf).topk(count, dim=1).indices.int()
        return torch.where(scores.isfinite().all(dim=1, keepdim=True), ids, -1)

    def scores_of(self, queries: Tensor, ids: Tensor) -> Tensor:
        """Estimate queries (m, head_dim) times keys of ids (m, n) from codes, float32 (m, n); -inf for ids < 0."""
        codes = self.codes[ids.clamp_min(0).to(self.codes.device).long()].to(queries.device)
        rows = [code_scores(self.space, own, query[None]) for own, query in zip(codes, queries, strict=True)]
        bases, _ = estimated(self.space, queries)
        return torch.where(ids >= 0, torch.cat(rows) + bases[:, None], -torch.inf)

    def best_of(self, queries: Tensor, ids: Tensor, count: int) -> Tensor:
        """Select the `count` best of ids (m, n) by these codes for queries (m, head_dim), in the order of ids."""
        places = self.scores_of(queries, ids).topk(count, dim=1).indices
        return ids.gather(1, places.sort(dim=1).values)


def capacity_for(tokens: int) -> int:
    """Round `tokens` up to a multiple of ALIGNED, so that data after the codes is aligned."""
    return -(-tokens // ALIGNED) * ALIGNED


def add_to_heads(heads: Sequence[DeviceCodes], keys: Sequence[Tensor]) -> bool:
    """Code keys (n, head_dim) of each head of a device behind its codes, with one wait for all. False, and nothing
    done: not all finite.
    """
    bad = torch.zeros(1, dtype=torch.int32, device=keys[0].device)
    for codes, own in zip(heads, keys, strict=True):
        codes.write(own, bad)
    if bool(bad):
        return False
    for codes, own in zip(heads, keys, strict=True):
        codes.hold(codes.length + len(own))
    return True


def write_codes(space: DeviceSpace, keys: Tensor, codes: Tensor, bad: Tensor) -> None:
    """Write the codes (n, key_bytes) of keys (n, head_dim), n > 0, by the current stream.

    codes: where the keys are, or in host memory, which has them once the current stream is done. bad: int32 (1,) where
    the keys are, set to 1 if one is not finite.
    """
    if codes.device != keys.device:
        there = torch.empty_like(codes, device=keys.device)
        write_codes(space, keys, there, bad)
        codes.copy_(there, non_blocking=True)
        return
    kernels = kernels_for(keys, "codes.codes_triton")
    if kernels is not None:
        with _launching:  # threads would compile it side by side
            kernels.encode(keys, space.key_projection, space.shift, space[4:], codes, bad)
        return
    for some, into in zip(keys.split(ROWS_AT_ONCE), codes.split(ROWS_AT_ONCE), strict=True):
        bad |= ~some.isfinite().all()
        into.copy_(encoded(space, some.float()))


def encoded(space: DeviceSpace, keys: Tensor) -> Tensor:
    """Codes (n, key_bytes) uint8 of keys (n, head_dim) float32."""
    numbers = torch.floor(keys @ space.key_projection[: space.rank].T - space.shift[: space.rank])
    eights, fours, twos = numbers.split(list(space[4:]), dim=1)
    halves = [part.to(torch.uint8) for part in (fours + 8).clamp(0, 15).chunk(2, dim=1)]
    codes = [eights.clamp(-128, 127).to(torch.int8).view(torch.uint8), (halves[0] | halves[1] << 4) ^ SIGN]
    if space.num_2bit:
        parts = [part.to(torch.uint8) for part in (twos + 2).clamp(0, 3).chunk(4, dim=1)]
        codes.append((parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6) ^ SIGN)
    return torch.cat(codes, dim=1)


def estimated(space: DeviceSpace, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the terms that turn scores of queries (m, head_dim) into estimates of q . k, float32 (m,): the number to
    add to all `code_scores` of a query, and the variance of the remaining error.
    """
    return queries @ space.estimate[0], (queries @ space.query_projection.T).square() @ space.estimate[1]


def lacking(variances: Tensor, scale: float) -> Tensor:
    """Half the variance of logits (m,), of that of products as `estimated` has it: what is to be added to a logit."""
    return (variances * scale**2).clamp_max(MOST_VARIANCE) / 2


def code_scores(space: DeviceSpace, codes: Tensor, queries: Tensor) -> Tensor:
    """Estimate q . k from codes, up to a constant per query: (queries, codes) float32; queries (m, head_dim)."""
    eights, fours, twos = codes.split([space.num_8bit, space.num_4bit // 2, space.num_2bit // 4], dim=1)
    parts = [eights.view(torch.int8), fours & 15, fours.view(torch.int8) >> 4]
    parts += [*((twos >> at) & 3 for at in (0, 2, 4)), twos.view(torch.int8) >> 6]
    numbers = torch.cat([part.float() for part in parts], dim=1)
    return queries @ space.query_projection[: space.rank].T @ numbers.T
