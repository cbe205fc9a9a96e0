"""Sharing: one row's side of the tree: what it continues of others', and what it leaves there for others.

Parts of prompts are nodes, and a request finds those that end where one of its own parts does. With `cache_generated`,
so is what a row held at its end, an answer behind its prompt: a follow-up turn finds it wherever it ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache, own_tensors, pack, seal
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.store import rows_bytes
from retrieval_attn.engine.ids import Ids, int32_row
from retrieval_attn.engine.inflight_prefills import PrefillClaim
from retrieval_attn.engine.node import Namespace, Node, Payload, Place, Sizes
from retrieval_attn.engine.radix_cache import Lease, RadixCache
from retrieval_attn.engine.saved_text import OpenedText
from retrieval_attn.model.rope import Factors, length_rope
from retrieval_attn.model.weights import WeightState

__all__ = ["AnswerEntry", "PrefixEntry", "PrefixHandle", "text_mark"]


class PrefixEntry:
    """The cache that read a prefix. Requests continue forks of it, which share its keys and indexes.

    sizes: beyond what the node before it holds; maps of a store's files count as well. opened: the saved context that
    it is, or continues.
    """

    def __init__(self, cache: RetrievalCache, sizes: Sizes, shared: Sizes, opened: OpenedText | None) -> None:
        """shared: of what forks have together, with all that is before it."""
        self._cache, self.sizes, self.shared, self.opened = cache, sizes, shared, opened
        self._lock = threading.Lock()

    @classmethod
    def beyond(cls, cache: RetrievalCache, before: Payload | None, opened: OpenedText | None = None) -> PrefixEntry:
        """Of a cache that nobody changes from now on, which continued `before`. Its windows keep no room."""
        pack(cache)
        own, shared = _sizes(cache)  # every node has windows of its own
        known = before.shared if isinstance(before, PrefixEntry) else Sizes()
        return cls(cache, own.plus(shared.beyond(known)), shared, opened)

    def fork(self) -> RetrievalCache:
        """To be continued. Any thread."""
        with self._lock:
            return self._cache.fork()


def on_device(tensor: Tensor) -> bool:
    """Whether it lies beside host memory."""
    return tensor.device.type != "cpu"


def _sizes(cache: RetrievalCache) -> tuple[Sizes, Sizes]:
    """Of what a fork has a copy of, and of what forks share. Codes and clusters lie where windows do. Rows that a
    device reads do not count: they go before a text has to.
    """
    tensors = list(own_tensors(cache))
    own = sum(one.nbytes for one in tensors)
    apart = sum(one.nbytes for one in tensors if on_device(one))
    pages = 0 if cache.batch.exact is None else cache.batch.exact.nbytes
    codes = cache.device_nbytes - own - pages
    paths = [host for layer in cache.layers if isinstance(layer, RetrievalLayer) for host in layer.hosts]
    host = cache.host_nbytes - rows_bytes(paths)
    shared = Sizes(host, codes, pages) if apart else Sizes(host + codes, 0, pages)
    return Sizes(own - apart, apart), shared


class AnswerEntry(PrefixEntry):
    """A prompt and what was generated behind it, as the row had it at its end.

    A text continues it wherever one of its own parts ends. The answer's keys came through retrieval, and not from a
    reading, which attends to all: what continues it is what a cache that never ended would give.
    """


class PrefixHandle:
    """See the module. Belongs to the engine's thread, but for `known_tokens`.

    ids: int32, of the whole prompt; marks: of these, how many are no tokens: a saved context begins with one, and so do
    texts whose keys other weights or rotary factors made (`text_mark`). ends: where its parts end. saved: whether the
    first part is a saved context. lease: on the node that the row continues. claim: to read a part that others may
    want, or to wait for who reads it.
    """

    def __init__(self, ids: Ids, ends: Sequence[int], marks: int, namespace: Namespace, *, saved: bool) -> None:
        """namespace: of the request."""
        self._saved = saved
        self.ids, self.ends, self.marks, self.namespace = ids, list(ends), marks, namespace
        self.lease: Lease | None = None
        self.claim: PrefillClaim | None = None

    @property
    def held_tokens(self) -> int:
        """Of the prompt, those that the tree holds for the row, whoever read them."""
        return 0 if self.lease is None else self.lease.node.end - self.marks

    def namespace_of(self, part: int) -> Namespace:
        """A saved context is everybody's who names it, what continues it is not."""
        return None if self._saved and part == 0 else self.namespace

    def find(self, tree: RadixCache, known: int) -> tuple[Node, PrefixEntry] | None:
        """The longest known beginning behind `known` ids, which the row continues from now on; None: nothing is.

        Raises StoreDamagedError where files that it comes from were found damaged.
        """
        found = longest_cached_prefix(tree, self.ids, self.ends[:-1], self.namespace, known)
        if found is None:
            return None
        with found:
            node = found.node
            assert isinstance(node.held, PrefixEntry)
            if node.held.opened is not None:
                node.held.opened.require_whole()
            self._continue(tree.lease(node))
            return node, node.held

    def put(
        self, tree: RadixCache, whole: RetrievalCache, done: int, opened: OpenedText | None, seconds: float
    ) -> None:
        """The first `done` parts, the last of which was read just now, for others.

        whole: the cache as it was then, which nobody changes. opened: the saved context that it continues. seconds:
        that it took.
        """
        ids, space = self.ids[: self.ends[done - 1]], self.namespace_of(done - 1)
        lease = self._insert(tree, ids, PrefixEntry, whole, (opened, space, seconds))
        if self.claim is not None:
            self.claim.done(lease.node)
            self.claim = None
        self._continue(lease)

    def put_answer(
        self,
        tree: RadixCache,
        cache: RetrievalCache,
        tokens: Sequence[int],
        opened: OpenedText | None,
        token_seconds: float,
    ) -> None:
        """The whole prompt and tokens of its answer, as far as the cache holds them, for follow-up turns.

        cache: of a row that ends; it may still be in a graph. opened: as in `put`. token_seconds: of reading one.
        """
        fed = cache.get_seq_length() + self.marks - len(self.ids)
        assert 0 <= fed <= len(tokens), f"{fed} of {len(tokens)} tokens of an answer are held"
        whole = cache.fork()  # with windows of its own, where the row's are a graph's
        ids = np.concatenate((self.ids, int32_row(tokens[:fed])))
        whole.batch.note_ids(torch.from_numpy(ids[self.marks :].astype(np.int64))[None])
        seal(whole)
        seconds = token_seconds * (len(ids) - self.held_tokens)
        self._insert(tree, ids, AnswerEntry, whole, (opened, self.namespace, seconds)).release()

    def claim_part(self, tree: RadixCache, part: int, start: int) -> bool:
        """Claim the rest of a part, behind `start` ids; whether somebody else reads it."""
        if self.claim is None:
            spaces = self.namespace, self.namespace_of(part)
            self.claim = claimed(tree, self.ids[: self.ends[part]], start, spaces)
        return self.waits()

    def waits(self) -> bool:
        """Whether another request still reads what this one needs."""
        if self.claim is None or self.claim.mine:
            return False
        if not self.claim.future.done():
            return True
        if not self.claim.mine:
            self.claim = None
        return False

    def forget(self) -> None:
        """Let go of what was found: it may be given up for others."""
        if self.lease is not None:
            self.lease.release()
        self.lease = None

    def leave(self) -> None:
        """Give everything back."""
        if self.claim is not None:
            self.claim.release()
        self.claim = None
        self.forget()

    def known_tokens(self, tree: RadixCache) -> int:
        """Of a row that has not begun, tokens of its prompt that the tree has now, whole parts of it. Any thread."""
        if len(self.ends) < 2:
            return 0
        found = tree.match(self.ids[: self.ends[-2] + 1], self.namespace, again=True).length
        return max((end - self.marks for end in self.ends[:-1] if end <= found), default=0)

    def shares_prefix_with(self, other: PrefixHandle, tokens: int) -> bool:
        """Whether so many tokens are whole parts of both prompts, the same ones, and both may have them of the tree."""
        end = tokens + self.marks
        if self._saved or other._saved or self.marks != other.marks or self.namespace != other.namespace:
            return False
        return end in self.ends[:-1] and end in other.ends[:-1] and np.array_equal(self.ids[:end], other.ids[:end])

    def _insert(
        self, tree: RadixCache, ids: Ids, kind: type[PrefixEntry], whole: RetrievalCache,
        about: tuple[OpenedText | None, Namespace, float],
    ) -> Lease:  # fmt: skip
        """A lease on the node of all these ids, made of the cache where there is none."""
        opened, namespace, seconds = about
        match = tree.match(np.append(ids, np.int32(0)), self.namespace, leased=True, again=True)
        assert match.lease is not None
        with match.lease:
            node, place = match.node, match.place
            if match.length == len(ids) and match.tokens < len(node) and node.parent is not None:
                place = Place(node.parent, node.at)  # another text goes on where this one ends: they stand side by side
            rest = ids[place.length :]
            if len(rest):
                before = None if self.lease is None else self.lease.node.held  # what it goes on with, wherever it is
                node = tree.insert(place, rest, kind.beyond(whole, before, opened), namespace, rebuild_seconds=seconds)
            return tree.lease(node)

    def _continue(self, lease: Lease) -> None:
        if self.lease is not None:
            self.lease.release()
        self.lease = lease


_marks: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[WeightState, Factors | None], int]]
_marks = weakref.WeakKeyDictionary()
_marks_lock = threading.Lock()
FIRST_MARK = 1 << 30
"""Marks of saved contexts are nearer to 0."""


def text_mark(model: PreTrainedModel, weights: WeightState, tokens: int) -> Ids:
    """What a text of `tokens` tokens begins with in a tree: its keys serve only texts that begin with the same.

    Nothing for the first weights, and rotary factors, of a model; else one id that no text has. Any thread.
    """
    rope = length_rope(model)
    key = weights, None if rope is None else rope.factors(tokens)
    with _marks_lock:
        known = _marks.setdefault(model, {})
        number = known.setdefault(key, len(known))
    return np.full(min(number, 1), -FIRST_MARK - number, np.int32)


def claimed(tree: RadixCache, ids: Ids, start: int, namespaces: tuple[Namespace, Namespace]) -> PrefillClaim | None:
    """A claim to read ids behind the first `start`; None: these were given up meanwhile, and nobody can continue them.

    namespaces: of who asks, and of what is read.
    """
    match = tree.match(ids[: start + 1], namespaces[0], leased=True, again=True)
    assert match.lease is not None
    with match.lease:
        return tree.pending(match, ids[start:], namespaces[1]) if match.length == start else None


def longest_cached_prefix(
    tree: RadixCache, ids: Ids, ends: Sequence[int], namespace: Namespace, known: int
) -> Lease | None:
    """A lease on the longest node of a text that ends where one of its parts does, or holds an answer, behind `known`
    tokens; None: none is in memory. ids: of the whole text. A match is counted once for a text, where nothing of it is
    known.
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
