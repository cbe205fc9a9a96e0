"""Use of the prefix cache by one request: the prefix that it continues, and the entries that it leaves.

Parts of prompts are nodes. A request continues the entry with the longest common prefix, cropped at the first token
that differs. Models that cannot crop (a state or a sliding window) continue entries that end where one of the prompt's
parts ends. With `cache_generated`, a prompt with its answer is an entry too.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import (
    CodedSegments,
    RetrievalCache,
    head_codes_of,
    offload_windows,
    own_tensors,
    pack,
    seal,
    windows_of,
)
from retrieval_attn.attention.retrieval import DECODE_TOKENS, RetrievalLayer
from retrieval_attn.cpu.store import SequenceKV, held_memory
from retrieval_attn.engine.ids import Ids, int32_row
from retrieval_attn.engine.inflight_prefills import PrefillClaim
from retrieval_attn.engine.node import Namespace, Node, Place, Sizes
from retrieval_attn.engine.radix_cache import Lease, RadixCache
from retrieval_attn.engine.saved_text import OpenedText, UnsavedText
from retrieval_attn.gpu.attention.window import copy_to_host
from retrieval_attn.model.images import is_image_id
from retrieval_attn.model.rope import Factors, length_rope
from retrieval_attn.model.weights import WeightState
from retrieval_attn.offload.codes import HeadCodes, copy_codes, load_codes, offload_codes
from retrieval_attn.offload.staging import brought_together
from retrieval_attn.offload.threads import TurnLock
from retrieval_attn.saving.layers import mapped_bytes, require_savable

__all__ = ["AnswerEntry", "PrefixEntry", "PrefixHandle", "crop_end", "joined_parts", "text_mark"]


WINDOWS_AT_ONCE = 8
"""Windows of a prefix that are copied to host memory while its lock is held."""


class PrefixEntry:
    """Cache of a prefix, as payload of a node. Requests continue forks of it, which share its keys and indexes.

    opened: the saved context that the prefix is, or continues. saved: the copy that the disk tier made of it, or None.
    saved_use: `Node.used` when that copy was made. unsavable: whether the disk tier cannot save it. has_answer: whether
    it has a generated answer that none of its ancestors has.
    """

    copied = False
    has_answer = False

    def __init__(
        self, cache: RetrievalCache, sizes: Sizes, shared: Sizes, opened: OpenedText | None, *, first: bool,
        supersedes: Sequence[object],
    ) -> None:  # fmt: skip
        """shared: bytes that forks share, those of all ancestors included. first: the entry continues no other one.
        supersedes: entries whose codes are its own from now on.
        """
        self._cache, self.shared, self.opened = cache, shared, opened
        self._maps = opened is not None and first
        self.saved: UnsavedText | None = None
        self.saved_use, self.unsavable = 0.0, False
        self._whole, self._lock = sizes, TurnLock()
        self._codes = head_codes_of(cache)
        self._own: list[HeadCodes] = []  # those that no ancestor has
        for one in self._codes:
            if one.owner is None or (owner := one.owner()) is None or owner in supersedes:
                one.owner = weakref.ref(self)
                self._own.append(one)
        self._segments = CodedSegments(cache, self._own)
        self._coded = self._coded_bytes()
        self._windows = sum(one.nbytes for one in own_tensors(cache) if on_device(one))
        self._offloaded = self._windows_copied = False  # windows are in host memory, for good, or there as well

    @classmethod
    def beyond(
        cls, cache: RetrievalCache, before: Sizes, opened: OpenedText | None = None, supersedes: Sequence[object] = ()
    ) -> PrefixEntry:
        """Make an entry of a cache that is not changed from now on; its windows keep no room.

        before: bytes that the fork which the cache continued shares with its own entry. supersedes: as above.
        """
        pack(cache)
        own, shared = _sizes(cache)  # every node has windows of its own
        sizes = own.plus(shared.beyond(before))
        return cls(cache, sizes, shared, opened, first=not before.total, supersedes=supersedes)

    @property
    def sizes(self) -> Sizes:
        """Bytes beyond those of the parent. Mapped files of a store count only if they are page-locked: the system
        evicts other pages of them if it needs the memory.
        """
        (host, device, pages), offloaded = self._whole, self._offloaded
        host += mapped_bytes(self._cache).locked if self._maps else 0
        host += sum(one.copied_nbytes for one in self._own) + (self._windows if self._windows_copied else 0)
        device += self._coded_bytes() - self._coded - (self._windows if offloaded else 0)
        return Sizes(host, max(0, device), pages)

    def _coded_bytes(self) -> int:
        return sum(one.device_nbytes for one in self._own) + self._segments.device_nbytes

    def copy_to_host(self) -> None:
        """Copy windows and codes to host memory, so that `offload` need not. Thread-safe."""
        try:
            copy_codes(self._own)
            self._segments.copy_to_host()
            windows = windows_of(self._cache)
            for start in range(0, len(windows), WINDOWS_AT_ONCE):
                with self._lock.later():  # few at once: a question may wait for it
                    copy_to_host(windows[start : start + WINDOWS_AT_ONCE], brought_together)
            self._windows_copied = True
        finally:
            self.copied = True  # after an error `offload` copies the rest

    def offload(self) -> None:
        """Move windows and codes to host memory, where forks find them. Thread-safe."""
        with self._lock:
            offload_windows(self._cache)
            offload_codes(self._own)
            self._segments.offload()
            self.copied = self._offloaded = self._windows_copied = True

    @property
    def offloaded_bytes(self) -> int:
        """GPU memory that the next fork takes for codes that are offloaded."""
        return sum(one.copied_nbytes for one in self._codes if one.offloaded)

    def has_room(self) -> bool:
        """Return whether the GPU has room for the offloaded codes and a question without idle texts."""
        nbytes = self.offloaded_bytes
        return not nbytes or self._cache.index.can_ask(nbytes, self._cache.get_seq_length())

    def can_fork(self, tokens: int) -> bool:
        """Return whether a request can continue after the first `tokens` tokens."""
        return self._cache.can_keep(tokens)

    def part(self, tokens: int) -> PrefixEntry | None:
        """Return an entry of the first `tokens` tokens; itself for all of them. None if the cache cannot be cropped."""
        if tokens == self._cache.get_seq_length():
            return self
        if not self.can_fork(tokens):
            return None
        return PrefixEntry(self.fork(tokens), Sizes(), Sizes(), self.opened, first=False, supersedes=())

    def require_savable(self) -> None:
        """Raise InputDataError if the entry cannot be saved."""
        require_savable(self._cache)

    def fork(self, tokens: int | None = None) -> RetrievalCache:
        """Return a cache of the first `tokens` tokens (default: all) for a request to continue. Thread-safe.

        A shorter fork shares host rows, indexes and codes of the whole entry, which are searched up to its end; its
        window is read back from host memory.
        """
        with self._lock:
            nbytes = self.offloaded_bytes
            self._cache.index.make_room_to_ask(nbytes, self._cache.get_seq_length())
            cache = self._cache.fork()
            if nbytes:  # behind the windows, whose copies would wait for threads and bus
                load_codes(self._codes)
        if tokens is not None and tokens < cache.get_seq_length():
            cache.crop(tokens - cache.get_seq_length())
        return cache

    def view(self) -> RetrievalCache:
        """Return a fork of the whole cache to read from: it shares the windows, which are not changed. Thread-safe."""
        with self._lock:
            return self._cache.view()


def paths_of(cache: RetrievalCache) -> list[SequenceKV]:
    """Return the paths of all layers and rows."""
    return [host for layer in cache.layers if isinstance(layer, RetrievalLayer) for host in layer.hosts]


def on_device(tensor: Tensor) -> bool:
    """Return whether a tensor is in device memory."""
    return tensor.device.type != "cpu"


def _sizes(cache: RetrievalCache) -> tuple[Sizes, Sizes]:
    """Return the bytes that a fork copies and those that forks share.

    Codes and clusters count where windows are. Rows mirrored for a device do not count: they are freed before any
    entry. Mapped files of a store are cache of the disk and do not count either.
    """
    tensors = list(own_tensors(cache))
    own = sum(one.nbytes for one in tensors)
    apart = sum(one.nbytes for one in tensors if on_device(one))
    pages = 0 if cache.batch.paged_prefix is None else cache.batch.paged_prefix.nbytes
    codes = cache.device_nbytes - own - pages
    host = held_memory(paths_of(cache), reclaimable=False).host - mapped_bytes(cache).nbytes
    shared = Sizes(host, codes, pages) if apart else Sizes(host + codes, 0, pages)
    return Sizes(own - apart, apart), shared


CROP_TOKENS = 64
"""Tokens that a cropped entry must save beyond one that ends with a part: cropping reads a window back."""


def crop_end(matched: int, ends: Sequence[int]) -> int:
    """Return where to crop a cached prefix after `matched` equal ids, fewer than the prompt has.

    At the end of a part if one is near, because the prompt alone is prefilled in these parts; else so that the rest of
    the part is not short enough to be decoded through the index. ends: ends of the prompt's parts.
    """
    part = bisect_right(ends, matched)
    start = ends[part - 1] if part else 0
    if part and matched - start < CROP_TOKENS:
        return start
    return min(matched, ends[part] - DECODE_TOKENS - 1)


LEAST_TOKENS, LEAST_SHARE = 2048, 1 / 4
"""Minimum tokens of a part between the first and the last one: these, and a share of the tokens before it."""


def joined_parts(parts: Sequence[Ids]) -> list[Ids]:
    """Join short parts of a prompt whose cache can be cropped at any token, except the first and the last part.

    Each part of a prefill takes time that grows with the tokens before it, and a conversation has many short ones. Long
    parts have entries of their own, so that the beginning of a conversation outlasts its end.
    """
    joined, waiting, before = list(parts[:1]), list[Ids](), sum(map(len, parts[:1]))
    for part in parts[1:-1]:
        waiting.append(part)
        tokens = sum(map(len, waiting))
        if tokens >= max(LEAST_TOKENS, LEAST_SHARE * before):
            joined.append(np.concatenate(waiting))
            waiting, before = [], before + tokens
    return [*joined, *([np.concatenate(waiting)] if waiting else []), *parts[1:][-1:]]


LAST_TOKENS = 512
"""Minimum tokens for an entry of a prompt's last part. Earlier parts with fewer tokens together get one entry."""


class AnswerEntry(PrefixEntry):
    """A prompt with its generated answer, as payload of a node.

    A prompt continues it wherever one of its own parts ends. Keys of the answer were computed with retrieval, as in a
    cache that goes on.
    """

    has_answer = True


class PrefixHandle:
    """Use of the prefix cache by one request. Belongs to the engine's thread, except `known_tokens`.

    Attributes:
        ids: int32, the whole prompt after its marks.
        marks: leading ids that are no tokens, of a saved context or of other weights or rotary factors (`text_mark`).
        ends: ends of the prompt's parts.
        saved: whether the first part is a saved context.
        crops: whether entries may be cropped at any token.
        lease: lease on the node that the request continues, up to `held_end` ids.
        claim: claim to prefill a part, or to wait for the request that does.
        lacks_room: whether the last `find` found a prefix whose codes lack GPU memory until another request ends.
    """

    def __init__(
        self, ids: Ids, ends: Sequence[int], marks: int, namespace: Namespace, *, saved: bool, crops: bool,
        session: str = "",
    ) -> None:  # fmt: skip
        """namespace: namespace of the request. session: see `Request`."""
        self._saved, self._crops, self._session = saved, crops, session
        self.ids, self.ends, self.marks, self.namespace = ids, list(ends), marks, namespace
        self.lease: Lease | None = None
        self.claim: PrefillClaim | None = None
        self.lacks_room = False
        self.held_end = self._matched = 0
        self._superseded: list[Node] = []  # by the entry that was inserted last
        self._before = Sizes()  # of the continued fork, shared with its entry

    @property
    def held_tokens(self) -> int:
        """Prompt tokens that the prefix cache holds for the request."""
        return 0 if self.lease is None else self.held_end - self.marks

    def keeps_last(self, tokens: int) -> bool:
        """Return whether `tokens` prefilled tokens of the last part become an entry.

        A later prompt may share any of them, if entries can be cropped. An entry has windows of its own, which cost
        more than another prefill of a short question.
        """
        return self._crops and tokens >= LAST_TOKENS

    def namespace_of(self, part: int) -> Namespace:
        """Return the namespace of a part: None for a saved context, which all requests that name it share."""
        return None if self._saved and part == 0 else self.namespace

    def find(
        self, tree: RadixCache, known: int, *, can_wait: bool = False
    ) -> tuple[RetrievalCache, OpenedText | None] | None:
        """Fork the longest cached prefix beyond `known` ids, which the request continues; None if there is none.

        can_wait: return None and set `lacks_room` if its codes lack GPU memory that running requests hold.

        Returns the fork, of `held_tokens` tokens, and the saved context that it continues. Raises StoreDamagedError if
        files that it comes from are damaged.
        """
        self.lacks_room = False
        lease = longest_cached_prefix(tree, self.ids, self.ends[:-1], self.namespace, known)
        end = known if lease is None else lease.node.end
        if self._crops:
            cropped = self._cropped_prefix(tree, max(end, self.marks) + CROP_TOKENS)
            if cropped is not None:
                if lease is not None:
                    lease.release()
                lease, end = cropped
        if lease is None:
            return None
        with lease:
            entry = lease.node.held
            assert isinstance(entry, PrefixEntry)
            if entry.opened is not None:
                entry.opened.lineage.require_whole()
            self.lacks_room = can_wait and not entry.has_room()
            if self.lacks_room:
                return None
            cache = entry.fork(end - self.marks)
            tree.recount(lease.node)
            self._continue(tree, tree.lease(lease.node), end, cache)
            return cache, entry.opened

    def _cropped_prefix(self, tree: RadixCache, least: int) -> tuple[Lease, int] | None:
        """Return a lease on the entry with the longest common prefix of at least `least` ids, and its length."""
        match = tree.match(self.ids, self.namespace, leased=True, again=True)
        assert match.lease is not None
        with match.lease:
            self._matched = match.length
            node, end = match.node, self._image_start(crop_end(match.length, self.ends))
            while end <= node.start and node.parent is not None:
                node = node.parent
            while node.parent is not None and end >= least:
                if isinstance(node.held, PrefixEntry) and node.held.can_fork(end - self.marks):
                    return tree.lease(node), end
                node, end = node.parent, self._image_start(node.start)
        return None

    def _image_start(self, end: int) -> int:
        """Return the start of the image that a prefix of `end` ids would end inside of, else `end`.

        Tokens of an image may attend to later ones of it, and equal first ids do not make images equal.
        """
        while self.marks < end < len(self.ids) and is_image_id(self.ids[end]) and is_image_id(self.ids[end - 1]):
            end -= 1
        return end

    def put(
        self, tree: RadixCache, whole: RetrievalCache, done: int, opened: OpenedText | None, seconds: float
    ) -> None:
        """Insert the first `done` parts, the last of which was just prefilled.

        Consecutive short parts get one entry, which is cropped to the end of each: every entry has windows of its own.
        A short part before a long one gets its own entry, because a long entry stays in memory with its crops. The
        claim stays with the request until the entry.

        Args:
            tree: prefix cache.
            whole: final cache of these parts.
            done: number of parts.
            opened: saved context that it continues.
            seconds: duration of the prefill.
        """
        if self._is_in_later_entry(done):
            return
        ids, space = self.ids[: self.ends[done - 1]], self.namespace_of(done - 1)
        lease = self._insert(tree, ids, PrefixEntry, whole, opened=opened, namespace=space, seconds=seconds)
        if self.claim is not None:
            self.claim.done(lease.node)
            self.claim = None
        self._continue(tree, lease, len(ids), whole)
        tree.supersede(self._superseded, lease.node)

    def _is_in_later_entry(self, done: int) -> bool:
        if not self._crops or done >= len(self.ends) - 1 or (self._saved and done == 1):
            return False
        return self.ends[done] - self.held_end < LAST_TOKENS

    def put_opened(
        self, tree: RadixCache, whole: RetrievalCache, text: Ids, opened: OpenedText, seconds: float
    ) -> RetrievalCache:
        """Insert a saved context that was opened; return a fork of the tokens with which the prompt begins.

        Args:
            tree: prefix cache.
            whole: cache of the whole context.
            text: ids of the context, with its mark.
            opened: the context.
            seconds: duration of the opening.
        """
        ids = np.concatenate((self.ids[: self.marks - 1], text))
        lease = self._insert(tree, ids, PrefixEntry, whole, opened=opened, namespace=None, seconds=seconds)
        if self.claim is not None:
            self.claim.done(lease.node)
            self.claim = None
        entry, end = lease.node.held, self.ends[0]
        assert isinstance(entry, PrefixEntry)
        cache = entry.fork(end - self.marks)
        self._continue(tree, lease, end, cache)
        return cache

    def put_answer(
        self,
        tree: RadixCache,
        cache: RetrievalCache,
        tokens: Sequence[int],
        opened: OpenedText | None,
        token_seconds: float,
    ) -> None:
        """Insert the prompt and the tokens of its answer that are in the cache, for follow-up turns.

        Args:
            tree: prefix cache.
            cache: cache of a request that ends; it may still be in a graph.
            tokens: tokens of the answer.
            opened: saved context that it continues.
            token_seconds: seconds of prefill per token.
        """
        fed = cache.get_seq_length() + self.marks - len(self.ids)
        assert 0 <= fed <= len(tokens), f"{fed} of {len(tokens)} tokens of an answer are held"
        whole = cache.fork()  # with windows of its own, where the row's are a graph's
        for one, copy in zip(paths_of(cache), paths_of(whole), strict=True):
            copy.is_merged = one.is_merged
        ids = np.concatenate((self.ids, int32_row(tokens[:fed])))
        whole.batch.note_ids(torch.from_numpy(ids[self.marks :].astype(np.int64))[None])
        seal(whole)
        seconds = token_seconds * (len(ids) - self.held_tokens)
        with self._insert(
            tree, ids, AnswerEntry, whole, opened=opened, namespace=self.namespace, seconds=seconds
        ) as lease:
            self._keep_session(tree, lease)

    def join_rest(self, part: int, known: int) -> None:
        """Have the rest of a part, behind `known` ids inside it, be read with the last part, if it is too short for an
        entry: each read brings all earlier keys to the GPU. So an agent's turn is one read: its answer, and a result.
        """
        is_before_last = 0 < part == len(self.ends) - 2
        if self._crops and is_before_last and self.ends[part - 1] < known and self.ends[part] - known < LAST_TOKENS:
            del self.ends[part]

    def claim_part(self, tree: RadixCache, part: int, start: int) -> bool:
        """Claim the prefill of a part after `start` ids. Returns whether another request prefills it."""
        if self.claim is None:
            ids, owner = self.ids[: self.ends[part]], self.namespace_of(part)
            self.claim = claim_prefill(tree, ids, start, self.namespace, owner, self._matched)
        return self.waits()

    def waits(self) -> bool:
        """Return whether another request still prefills a needed part."""
        if self.claim is None or self.claim.is_owner:
            return False
        if not self.claim.future.done():
            return True
        if not self.claim.is_owner:
            self.claim = None
        return False

    def forget(self) -> None:
        """Release the cached prefix, which may be evicted then."""
        if self.lease is not None:
            self.lease.release()
        self.lease, self.held_end, self._before = None, 0, Sizes()

    def leave(self) -> None:
        """Release lease and claim."""
        if self.claim is not None:
            self.claim.release()
        self.claim = None
        self.forget()

    def known_tokens(self, tree: RadixCache) -> int:
        """Return the prompt tokens that are cached for a waiting request now. Any thread."""
        if self._crops:
            found = tree.match(self.ids, self.namespace, again=True).length - self.marks
            return found if found >= CROP_TOKENS else 0
        if len(self.ends) < 2:
            return 0
        found = tree.match(self.ids[: self.ends[-2] + 1], self.namespace, again=True).length
        return max((end - self.marks for end in self.ends[:-1] if end <= found), default=0)

    def cached_node(self, tree: RadixCache) -> Node:
        """Return the last node of the prefix that is cached for a waiting request now. Any thread."""
        return tree.match(self.ids, self.namespace, again=True).node

    def shares_prefix_with(self, other: PrefixHandle, tokens: int) -> bool:
        """Return whether both prompts begin with the same `tokens` tokens, and both can continue an entry of them."""
        end = tokens + self.marks
        if self._saved or other._saved or self.marks != other.marks or self.namespace != other.namespace:
            return False
        parts = end in self.ends[:-1] and end in other.ends[:-1]
        both = self._crops and other._crops and end < min(len(self.ids), len(other.ids))
        return (parts or both) and np.array_equal(self.ids[:end], other.ids[:end])

    def _insert(
        self,
        tree: RadixCache,
        ids: Ids,
        kind: type[PrefixEntry],
        whole: RetrievalCache,
        *,
        opened: OpenedText | None,
        namespace: Namespace,
        seconds: float,
    ) -> Lease:
        """Return a lease on the node of all these ids; insert it if it is missing."""
        match = tree.match(np.append(ids, np.int32(0)), self.namespace, leased=True, again=True)
        assert match.lease is not None
        with match.lease:
            node, place = match.node, match.place
            if match.length == len(ids) and self.lease is not None and self.lease.node is node:
                return tree.lease(node)  # the entry that it was cropped from has all of it
            if match.length == len(ids) and match.tokens < len(node) and node.parent is not None:
                place = Place(node.parent, node.at)  # another text goes on where this one ends: they stand side by side
            merged = [path.is_merged for path in paths_of(whole)]
            self._before = Sizes() if any(merged) else self._before
            has_answer = False
            if merged and all(merged):  # it needs none of its ancestors, which may be evicted before it
                place, has_answer = Place(tree.root, 0), self._continues_answer
                seconds += sum(one.rebuild_seconds for one in self._path)
            self._superseded = self._superseded_by(tree, whole, match.lease) if kind is PrefixEntry else []
            if self._superseded and not all(merged):
                last = self._superseded[-1]
                assert last.parent is not None
                place, before = Place(last.parent, last.at), last.parent.held
                self._before = before.shared if isinstance(before, PrefixEntry) else Sizes()
                has_answer = self._continues_answer
                seconds += sum(one.rebuild_seconds for one in self._superseded)
            rest = ids[place.length :]
            if len(rest):
                entry = kind.beyond(whole, self._before, opened, [one.held for one in self._superseded])
                entry.has_answer |= has_answer
                node = tree.insert(place, rest, entry, namespace, rebuild_seconds=seconds)
            return tree.lease(node)

    def _superseded_by(self, tree: RadixCache, whole: RetrievalCache, lease: Lease) -> list[Node]:
        """Return the nodes whose entries `whole` makes superfluous: it has gone on in the segments of the leased one or
        copied them, and is cropped as well as that. Their windows take more memory than a turn's keys.

        The first of several parts stays: it outlasts what follows. lease: another one of this request.
        """
        if self.lease is None or self.held_end < self.lease.node.end or not self._crops:
            return []
        if not (paths := paths_of(whole)) or not all(path.continues or path.is_merged for path in paths):
            return []
        found = tree.superseded((self.lease, lease), self.ends[0] if len(self.ends) > 1 else 0)
        held = [one.held for one in found]
        own = [one.opened is None and one.saved is None for one in held if isinstance(one, PrefixEntry)]
        return found if len(own) == len(found) and all(own) else []

    @property
    def _path(self) -> list[Node]:
        """Nodes of the tokens that were continued, root first."""
        path = [] if self.lease is None else self.lease.node.path()
        return [one for one in path if one.start < self.held_end]

    @property
    def _continues_answer(self) -> bool:
        """Whether the ids that were continued have a generated answer."""
        return any(isinstance(one.held, PrefixEntry) and one.held.has_answer for one in self._path)

    def _continue(self, tree: RadixCache, lease: Lease, end: int, cache: RetrievalCache) -> None:
        """Continue `cache`, which holds the first `end` ids of the leased node's entry."""
        self._keep_session(tree, lease)
        if self.lease is not None:
            self.lease.release()
        self.lease, self.held_end = lease, end
        entry = lease.node.held
        assert isinstance(entry, PrefixEntry)
        self._before = entry.shared if end == lease.node.end else _sizes(cache)[1]

    def _keep_session(self, tree: RadixCache, lease: Lease) -> None:
        if self._session:
            tree.keep_session(self._session, self.namespace, lease.node)


_marks: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[WeightState, Factors | None], int]]
_marks = weakref.WeakKeyDictionary()
_marks_lock = threading.Lock()
FIRST_MARK = 1 << 30
"""Marks of saved contexts are nearer to 0."""


def text_mark(model: PreTrainedModel, weights: WeightState, tokens: int) -> Ids:
    """Return the ids with which a text starts in the prefix cache, so that only texts with the same weights match.

    Empty for the first weights and rotary factors of a model, else one id that no text has. Any thread.
    """
    rope = length_rope(model)
    key = weights, None if rope is None else rope.factors(tokens)
    with _marks_lock:
        known = _marks.setdefault(model, {})
        number = known.setdefault(key, len(known))
    return np.full(min(number, 1), -FIRST_MARK - number, np.int32)


def claim_prefill(
    tree: RadixCache, ids: Ids, start: int, namespace: Namespace, owner: Namespace, matched: int
) -> PrefillClaim | None:
    """Claim the prefill of ids after the first `start`. Returns None if these were evicted meanwhile.

    namespace: of the request. owner: of the text that is prefilled. matched: see `RadixCache.pending`.
    """
    match = tree.match(ids[: start + 1], namespace, leased=True, again=True)
    assert match.lease is not None
    with match.lease:
        return tree.pending(match, ids[start:], owner, matched=matched) if match.length == start else None


def longest_cached_prefix(
    tree: RadixCache, ids: Ids, ends: Sequence[int], namespace: Namespace, known: int
) -> Lease | None:
    """Return a lease on the longest node beyond `known` tokens that ends with a part or holds an answer; None: none.

    ids: the whole prompt. One lookup is counted for a prompt, when nothing of it is known.
    """
    stop, again = len(ids), known > 0
    while stop > known:
        match = tree.match(ids[:stop], namespace, leased=True, again=again)
        assert match.lease is not None
        with match.lease:
            node, tokens = match.node, match.tokens
            while node.parent is not None and not (tokens == len(node) and _is_end(node, ends)):
                node, tokens = node.parent, node.at
            # a longer text that goes on otherwise hides one that ends within it
            hidden = max((end for end in ends if max(known, node.end) < end <= match.length), default=0)
            if not hidden:
                return tree.lease(node) if node.end > known and isinstance(node.held, PrefixEntry) else None
        stop, again = min(hidden + 1, stop - 1), True
    return None


def _is_end(node: Node, ends: Sequence[int]) -> bool:
    return node.end in ends or isinstance(node.held, AnswerEntry)
