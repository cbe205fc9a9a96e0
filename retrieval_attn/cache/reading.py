"""A pass of new tokens through one layer: exact attention, and the sample of queries that its index trains on."""

from __future__ import annotations

import logging
import weakref
from typing import NamedTuple

from torch import Tensor, nn

from retrieval_attn.cache.exact import ExactPass
from retrieval_attn.errors import CacheMismatchError
from retrieval_attn.gpu.attention.merge import Partial
from retrieval_attn.offload.queries import TrainingQueries

log = logging.getLogger(__name__)

FEW_TOKENS = 256
"""So many are nothing to warn of, and layers that read in chunks take them as they are."""
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class ReadingMark(NamedTuple):
    """How far a reading was."""

    done: object
    sampled: int


class Reading:
    """A pass under way. sample: None where the index does not train."""

    def __init__(self, done: ExactPass, sample: TrainingQueries | None) -> None:
        self.done = done
        self._sample = sample

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scale: float, softcap: float | None
    ) -> Partial:
        """See `ExactPass.step`; keeps the sampled queries of the chunk."""
        if self._sample is not None:
            self._sample.take(query, self.done.filled)
        return self.done.step(query, key, value, valid, scale, softcap)

    def complete(self) -> ExactPass:
        """The pass, all of it. Raises CacheMismatchError if tokens are missing."""
        done = self.done
        if done.filled != done.total:
            raise CacheMismatchError(f"A pass announced {done.total} tokens and brought {done.filled}.")
        return done

    def training_queries(self, model: nn.Module | None, module: nn.Module | None, row: int) -> Tensor | None:
        """The sample of one row where decoding will happen, see `TrainingQueries.on_device`; None without a sample."""
        if self._sample is None or module is None:
            return None
        valid = self.done.valid
        return self._sample.on_device(model, module, row, None if valid is None else valid[row])

    def mark(self) -> ReadingMark:
        """What `restore` needs to forget the chunks that follow."""
        return ReadingMark(self.done.mark(), 0 if self._sample is None else self._sample.mark())

    def restore(self, mark: ReadingMark) -> None:
        """As it was when `mark` was made."""
        self.done.restore(mark.done)
        if self._sample is not None:
            self._sample.restore(mark.sampled)


def warn_of_whole_prompts(model: nn.Module | None, tokens: int, chunk: int) -> None:
    """Log, once for a model, that a long prompt comes through its layers whole and not in chunks of `chunk` tokens."""
    if tokens <= max(chunk, FEW_TOKENS) or model is None or model in _warned:
        return
    _warned.add(model)
    log.warning(
        "%s reads %d tokens at once, and the activations of all of them have to fit the device's memory. Call "
        "retrieval_attn.enable(model), or generate within `with retrieval_attn.prefill_by_layer(model):`, and it reads "
        "layer by layer in chunks of %d tokens.",
        type(model).__name__,
        tokens,
        chunk,
    )
