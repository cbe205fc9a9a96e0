"""Keys of one text have the rotary factors of one length: a text that grows beyond a switch is read again.

Re-rotating stored keys would not do: keys of deeper layers come from hidden states that attended under the old factors.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any, Protocol

import torch
from torch import Tensor

from retrieval_attn.attention.sequence import Batch, known_ids
from retrieval_attn.errors import CacheMismatchError
from retrieval_attn.model.rope import LengthRope

log = logging.getLogger(__name__)
_PREPARE = "prepare_inputs_for_generation"


class LengthCache(Protocol):
    """Methods of a `RetrievalCache` about the length of its text and its rotary factors."""

    batch: Batch
    rope: LengthRope | None
    prompt_length: int

    def reset(self) -> None:
        """Forget everything."""


def note_factors(batch: Batch, rope: LengthRope, length: int, new_tokens: int) -> None:
    """Note the factors of a forward of a text of `length` tokens.

    Raises CacheMismatchError if earlier keys have others.
    """
    found = rope.factors(length)
    if not batch.columns:
        batch.factors = found
    elif batch.factors != found:
        if not (new_tokens == 1 and rope.decodes_on(batch.factors, length)):
            raise CacheMismatchError(
                f"This cache holds {batch.columns} tokens whose keys have other rotary factors than those of a text of "
                f"{length} tokens ({rope.kind}, which changes beyond {min(rope.switches)}): attention over both would "
                "be wrong. Call cache.reset() and pass the whole text in one forward; or use Context, LLM, Engine or "
                "generate, which read it again by themselves."
            )
        batch.factors = rope.after_token(batch.factors, length)


def goes_on(cache: LengthCache, length: int, *, decoding: bool = False) -> bool:
    """Whether tokens up to `length` may attend to the keys of a cache as they are. decoding: one generated token."""
    if cache.rope is None or not cache.batch.columns:
        return True
    held = cache.batch.factors
    return cache.rope.decodes_on(held, length) if decoding else held == cache.rope.factors(length)


def whole_text(
    cache: LengthCache, ids: Tensor | None, mask: Tensor | None, position_ids: Tensor, *, decoding: bool
) -> tuple[Tensor | None, Tensor]:
    """The ids (batch, new) and positions that a forward feeds: all of the text if its keys need other factors.

    The cache is empty then. mask: (batch, all columns) bool; None: no padding. decoding: ids are generated tokens, one
    for each row. Raises CacheMismatchError if earlier ids are not known.
    """
    length = max(int(position_ids.max()) + 1, cache.prompt_length)
    if goes_on(cache, length, decoding=decoding):
        return ids, position_ids
    if ids is None or cache.batch.known_columns() < cache.batch.columns:
        raise CacheMismatchError(
            f"The text reaches {length} tokens, for which the model has other rotary factors than for the "
            f"{cache.batch.columns} cached ones, and it cannot be read again: its token ids are not known. Pass "
            "input_ids of the whole text, with an empty cache."
        )
    ids = torch.cat([known_ids(cache.batch).to(ids.device), ids], dim=1)
    empty_for(cache, length)
    if mask is None:
        return ids, torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return ids, (mask.long().cumsum(dim=1) - 1).masked_fill(~mask.bool(), 1)


def empty_for(cache: LengthCache, length: int) -> None:
    """Forget all keys of a text that is read again, with a line in the log."""
    assert cache.rope is not None
    log.warning(
        "reading %d tokens again: a text of %d tokens has other rotary factors (%s, which changes beyond %d)",
        cache.batch.columns, length, cache.rope.kind, min(cache.rope.switches),
    )  # fmt: skip
    cache.reset()


# -- transformers' generate -------------------------------------------------------------------------------------------


def read_again_in_generate(model: Any) -> None:
    """Make `model.generate` read the text again when it passes a switch, into its RetrievalCache.

    Phi-3 by itself drops the cache there, also an empty one, and goes on with one of another kind.
    """
    if not isinstance(model.__dict__.get(_PREPARE), functools.partial) and hasattr(model, _PREPARE):
        original = getattr(model, _PREPARE)
        prepare: Any = functools.partial(_prepare, original)
        prepare.__signature__ = inspect.signature(original)  # generate looks for inputs_embeds there
        setattr(model, _PREPARE, prepare)


def _prepare(
    original: Any,
    input_ids: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    next_sequence_length: int | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Prepare inputs by `original`, the model's method. next_sequence_length: new columns of input_ids; None: all."""
    arguments = {"attention_mask": attention_mask, "next_sequence_length": next_sequence_length, **kwargs}
    if getattr(past_key_values, "rope", None) is None:
        found: dict[str, Any] = original(input_ids, past_key_values=past_key_values, **arguments)
        return found
    cache: LengthCache = past_key_values
    columns = input_ids.shape[1] if attention_mask is None else attention_mask.shape[-1]
    if attention_mask is not None and attention_mask.ndim == 2:
        length = int(attention_mask.sum(dim=-1).max())
    else:
        length = cache.batch.columns + input_ids.shape[1] if next_sequence_length is None else columns
    if not goes_on(cache, length, decoding=next_sequence_length == 1):
        if input_ids.shape[1] < max(columns, cache.batch.columns + 1):
            raise CacheMismatchError(
                f"The text reaches {length} tokens, for which the model has other rotary factors than for the "
                f"{cache.batch.columns} cached ones, and only its {input_ids.shape[1]} last token ids were given. Pass "
                "the ids of the whole text."
            )
        empty_for(cache, length)
        arguments["next_sequence_length"] = None
    found = original(input_ids, past_key_values=None, **arguments)
    found["past_key_values"] = cache
    return found
