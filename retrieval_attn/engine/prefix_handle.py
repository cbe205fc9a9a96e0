"""Use of the prefix cache by one request: the prefix that it continues, and the entries that it leaves.

Parts of prompts are nodes; a request finds nodes that end where one of its own parts ends. With `cache_generated`, a
prompt with its answer is a node too, which a follow-up turn finds wherever it ends.
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
    """Cache of a prefix, as payload of a node. Requests continue forks of it, which share its keys and indexes.

    sizes: bytes beyond those of the parent; mapped files of a store count too. opened: the saved context that the
    prefix is, or continues.
    """

    def __init__(self, cache: RetrievalCache, sizes: Sizes, shared: Sizes, opened: OpenedText | None) -> None:
        """shared: bytes that forks share, those of all ancestors included."""
        self._cache, self.sizes, self.shared, self.opened = cache, sizes, shared, opened
        self._lock = threading.Lock()

    @classmethod
    def beyond(cls, cache: RetrievalCache, before: Payload | None, opened: OpenedText | None = None) -> PrefixEntry:
        """Make the entry of a cache that continued `before` and is final. Its windows keep no spare room."""
        pack(cache)
        own, shared = _sizes(cache)  # every node has windows of its own
        known = before.shared if isinstance(before, PrefixEntry) else Sizes()
        return cls(cache, own.plus(shared.beyond(known)), shared, opened)

    def fork(self) -> RetrievalCache:
        """Fork the cache. Any thread."""
        with self._lock:
            return self._cache.fork()


def on_device(tensor: Tensor) -> bool:
    """Return whether a tensor is in device memory."""
    return tensor.device.type != "cpu"


def _sizes(cache: RetrievalCache) -> tuple[Sizes, Sizes]:
    """Return the bytes that a fork copies and those that forks share.

    Codes and clusters count where windows are. Rows mirrored for a device do not count: they are freed before any
    entry.
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
    """A prompt with its generated answer, as payload of a node.

    A prompt continues it wherever one of its own parts ends. Keys of the answer were computed with retrieval, as in a
    cache that goes on.
    """


class PrefixHandle:
    """Use of the prefix cache by one request. Belongs to the engine's thread, except `known_tokens`.

    Attributes:
        ids: int32, the whole prompt after its marks.
        marks: leading ids that are no tokens, of a saved context or of other weights or rotary factors (`text_mark`).
        ends: ends of the prompt's parts.
        saved: whether the first part is a saved context.
        lease: lease on the node that the request continues.
        claim: claim to prefill a part, or to wait for the request that does.
    """

    def __init__(self, ids: Ids, ends: Sequence[int], marks: int, namespace: Namespace, *, saved: bool) -> None:
        """namespace: namespace of the request."""
        self._saved = saved
        self.ids, self.ends, self.marks, self.namespace = ids, list(ends), marks, namespace
        self.lease: Lease | None = None
        self.claim: PrefillClaim | None = None

    @property
    def held_tokens(self) -> int:
        """Prompt tokens that the prefix cache holds for the request."""
        return 0 if self.lease is None else self.lease.node.end - self.marks

    def namespace_of(self, part: int) -> Namespace:
        """Return the namespace of a part: None for a saved context, which all requests that name it share."""
        return None if self._saved and part == 0 else self.namespace

    def find(self, tree: RadixCache, known: int) -> tuple[Node, PrefixEntry] | None:
        """Return the longest cached prefix beyond `known` ids, which the request continues from now on; None: none.

        Raises StoreDamagedError if files that it comes from are damaged.
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
        """Insert the first `done` parts, the last of which was just prefilled.

        Args:
            tree: prefix cache.
            whole: final cache of these parts.
            done: number of parts.
            opened: saved context that it continues.
            seconds: duration of the prefill.
        """
        ids, space = self.ids[: self.ends[done - 1]], self.namespace_of(done - 1)
        lease = self._insert(tree, ids, PrefixEntry, whole, opened=opened, namespace=space, seconds=seconds)
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
        ids = np.concatenate((self.ids, int32_row(tokens[:fed])))
        whole.batch.note_ids(torch.from_numpy(ids[self.marks :].astype(np.int64))[None])
        seal(whole)
        seconds = token_seconds * (len(ids) - self.held_tokens)
        self._insert(tree, ids, AnswerEntry, whole, opened=opened, namespace=self.namespace, seconds=seconds).release()

    def claim_part(self, tree: RadixCache, part: int, start: int) -> bool:
        """Claim the prefill of a part after `start` ids. Returns whether another request prefills it."""
        if self.claim is None:
            ids, owner = self.ids[: self.ends[part]], self.namespace_of(part)
            self.claim = claim_prefill(tree, ids, start, self.namespace, owner)
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
        self.lease = None

    def leave(self) -> None:
        """Release lease and claim."""
        if self.claim is not None:
            self.claim.release()
        self.claim = None
        self.forget()

    def known_tokens(self, tree: RadixCache) -> int:
        """Return the prompt tokens, in whole parts, that are cached for a waiting request now. Any thread."""
        if len(self.ends) < 2:
            return 0
        found = tree.match(self.ids[: self.ends[-2] + 1], self.namespace, again=True).length
        return max((end - self.marks for end in self.ends[:-1] if end <= found), default=0)

    def shares_prefix_with(self, other: PrefixHandle, tokens: int) -> bool:
        """Return whether `tokens` tokens are the same whole parts of both prompts, visible to both."""
        end = tokens + self.marks
        if self._saved or other._saved or self.marks != other.marks or self.namespace != other.namespace:
            return False
        return end in self.ends[:-1] and end in other.ends[:-1] and np.array_equal(self.ids[:end], other.ids[:end])

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
    tree: RadixCache, ids: Ids, start: int, namespace: Namespace, owner: Namespace
) -> PrefillClaim | None:
    """Claim the prefill of ids after the first `start`. Returns None if these were evicted meanwhile.

    namespace: of the request. owner: of the text that is prefilled.
    """
    match = tree.match(ids[: start + 1], namespace, leased=True, again=True)
    assert match.lease is not None
    with match.lease:
        return tree.pending(match, ids[start:], owner) if match.length == start else None


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
