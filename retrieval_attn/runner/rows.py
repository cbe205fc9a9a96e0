"""One forward for rows that each have a `RetrievalCache` of their own: `step`. A row has one new token, or several.

The model runs once: its linear parts, norms and output see all rows together. At a cache layer, queries, keys and
values part, and every row goes through the layer of its own cache, which counts, spills and indexes its tokens as if it
were alone. A row joins by being in the list and leaves by not being in it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.decode_batch import DecodeTokens, StepPlans, decode_batch
from retrieval_attn.attention.layer import CacheLayer, PendingLayer
from retrieval_attn.attention.reread import goes_on
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.errors import BackendError, CacheMismatchError, ShapeError, UnsupportedModelError
from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.index.threads import use_threads
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.model.placement import input_device
from retrieval_attn.model.rope import Factors, length_rope
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import forward
from retrieval_attn.runner.drafts import DRAFTED_TOKENS
from retrieval_attn.runner.graph.sequence_slot import StepClock


class RowsState(LinearAttentionLayer):
    """The rows' states joined along the batch; transformers updates them in place, `give_back` hands each row its own.

    The rows keep the states from before until then.
    """

    def __init__(self, layers: Items[StateLayer]) -> None:
        """Raises CacheMismatchError where one row has a state and another has none."""
        first = layers[0]
        super().__init__(first.number_of_states)
        self._layers = list(layers)
        states: list[dict[tuple[str, int], Any]] = [layer.confirmed_states() for layer in layers]
        if any(one.keys() != states[0].keys() for one in states):
            raise CacheMismatchError(
                "All rows need the same states of linear-attention layers, but some have none; read a prompt into each "
                "cache first."
            )
        plain = {name: value for name, value in vars(first).items() if name not in ("graph", "number_of_states")}
        vars(self).update({name: dict(value) if isinstance(value, dict) else value for name, value in plain.items()})
        for name, number in states[0]:
            getattr(self, name)[number] = torch.cat([one[name, number] for one in states])

    def give_back(self) -> None:
        """The forward is over: every row's layer has the state that it has come to."""
        for row, layer in enumerate(self._layers):
            for (name, number), own in layer.states():
                own.copy_(getattr(self, name)[number][row : row + 1])


class RowsFailedError(BackendError):
    """Some rows of a batched decode step failed; the other rows have their token.

    errors: exceptions by row. logits: (rows, vocabulary) float32; rows in `errors` are undefined.
    """

    def __init__(self, errors: Mapping[int, Exception], logits: Any) -> None:
        self.errors, self.logits = dict(errors), logits
        failed = "; ".join(f"row {row}: {type(error).__name__}: {error}" for row, error in self.errors.items())
        super().__init__(f"{failed}. The caches of these rows are unusable; the other rows have their token.")


_plans: weakref.WeakKeyDictionary[PreTrainedModel, StepPlans] = weakref.WeakKeyDictionary()


@torch.no_grad()
def step(
    model: PreTrainedModel,
    caches: Items[RetrievalCache],
    tokens: Items[int] | Tensor,
    positions: Items[int] | Tensor,
    clock: StepClock | None = None,
    counts: Items[int] | None = None,
) -> Tensor:
    """Logits (tokens, vocabulary) float32 after the new tokens of each cache, which hold them then.

    caches: of one sequence each, filled by this model. tokens, positions: (tokens,), the new tokens of one cache after
    another, and their positions; int64 on the model's input device, or numbers. No rows give (0, vocabulary). clock: is
    told the seconds. counts: new tokens of each cache; None: one. Several retrieve, each like a generated token, and
    may be cropped; `can_draft` says for which caches.

    Raises CacheMismatchError before anything happens for a cache that cannot take part, ShapeError for lists of
    different lengths. Several tokens of a row need rotary factors that do not change. Raises RowsFailedError, with the
    logits, where some rows' search failed: the others have their token. After any other exception no cache of the list
    can be used any more, but for those refused before.
    """
    device = input_device(model)
    token_ids, places = (torch.as_tensor(given, dtype=torch.int64, device=device) for given in (tokens, positions))
    model = unwrapped(model)
    counts = [1] * len(caches) if counts is None else list(counts)
    if not token_ids.shape == places.shape == (sum(counts),) or len(counts) != len(caches):
        raise _not_one_each(caches, tuple(token_ids.shape), tuple(places.shape))
    require_rows(caches)
    if not caches:
        return torch.empty(0, model.get_output_embeddings().weight.shape[0], device=device)
    has_blocks = len(token_ids) > len(caches)
    if has_blocks and caches[0].rope is not None:
        raise CacheMismatchError("A model whose rotary factors change with the text steps one token of each row.")
    logits: list[tuple[list[int], Tensor]] = []
    errors: dict[int, Exception] = {}
    with _stepping(model, caches, clock) as plans:
        again = _read_again(model, caches, token_ids, places, errors)
        logits += [([row], one) for row, one in again.items()]
        left = [row for row in range(len(caches)) if row not in again and row not in errors]
        groups = [left] if has_blocks else position_groups(model, places[left]) if left else []
        for group in groups:
            rows = [left[place] for place in group]
            together = RowsCache([caches[row] for row in rows], plans, [counts[row] for row in rows])
            own = (token_ids, places) if len(rows) == len(caches) else (token_ids[rows], places[rows])
            found = forward(model, together, own[0][:, None], mask=None, position_ids=own[1][:, None])  # type: ignore[arg-type]
            together.finish()
            logits.append((rows, found))
            errors.update((rows[row], error) for row, error in together.errors.items())
            if caches[0].rope is not None:
                _note_tokens([caches[row] for row in rows], *own)
    if len(logits) == 1 and len(logits[0][0]) == len(caches):
        result = logits[0][1]
    else:
        vocabulary = model.get_output_embeddings().weight.shape[0]
        result = torch.zeros(len(caches), vocabulary, device=device)
        for rows, found in logits:
            result[rows] = found
    if errors:
        raise RowsFailedError(dict(sorted(errors.items())), result)
    return result


@contextmanager
def _stepping(model: PreTrainedModel, caches: Items[RetrievalCache], clock: StepClock | None) -> Iterator[StepPlans]:
    """Retrieve in this context, and count its time. Nothing can follow in caches whose forward failed half-way."""
    plans = _plans.setdefault(model, StepPlans())
    before, began = plans.host_seconds, time.perf_counter()
    try:
        with using_retrieval(model, caches[0].config.prefill_chunk):
            yield plans
    except BaseException as error:  # somewhere in the middle of a layer, or of a token
        for cache in caches:
            cache.batch.broken = cache.batch.broken or f"{type(error).__name__}: {error}"
        raise
    if clock is not None:
        clock.host += plans.host_seconds - before
        clock.device += time.perf_counter() - began


def can_draft(cache: RetrievalCache) -> bool:
    """Return whether the newest tokens of a cache of one sequence can be cropped as if they never were: no layer keeps
    a state or has a callback, and rotary factors do not depend on the length.
    """
    plain = all(isinstance(layer, CacheLayer) and layer.on_attention is None for layer in cache.layers)
    plain = plain and cache.batch.valid is None
    return plain and cache.rope is None and len(cache.batch.sequences) == 1


def tokens_before_spill(cache: RetrievalCache) -> int:
    """Return the tokens that windows take before their oldest block moves to the host, which no crop undoes."""
    held = [layer.held for layer in cache.layers if isinstance(layer, RetrievalLayer) and layer.held is not None]
    room = min((one.window.room for one in held), default=DRAFTED_TOKENS + 1)
    positions = cache.max_positions
    left = room if positions is None else positions - cache.get_seq_length()
    return max(0, min(room - 1, left))


def require_rows(caches: Items[RetrievalCache], inputs: Items[object] | None = None) -> None:
    """Raise as `step` does for what cannot take part in one. inputs: one for each."""
    if inputs is not None and len(inputs) != len(caches):
        raise _not_one_each(caches, len(inputs))
    seen: set[int] = set()
    for row, cache in enumerate(caches):
        _require_usable(row, cache, caches[0], twice=id(cache) in seen)
        seen.add(id(cache))


def _not_one_each(caches: Items[RetrievalCache], *given: object) -> ShapeError:
    return ShapeError(
        f"step needs one token and one position for each of {len(caches)} caches, got {' and '.join(map(str, given))}."
    )


def _require_usable(row: int, cache: RetrievalCache, first: RetrievalCache, *, twice: bool) -> None:
    """Raise CacheMismatchError for a cache that cannot be a row. twice: it is one already."""
    problem = None
    if not isinstance(cache, RetrievalCache):
        problem = f"is a {type(cache).__name__}: rows are RetrievalCaches"
    elif cache.batch.broken:
        problem = f"failed before ({cache.batch.broken}): take it out of the list"
    elif len(cache.batch.sequences) != 1 or not cache.batch.columns:
        problem = (
            f"holds {len(cache.batch.sequences)} sequences of {cache.batch.columns} tokens: a row is one sequence that "
            "has been read"
        )
    elif len(cache.layers) != len(first.layers) or cache.model_type != first.model_type:
        problem = (
            f"was made for a {cache.model_type} model of {len(cache.layers)} layers, the first for a "
            f"{first.model_type} model of {len(first.layers)}: rows belong to one model"
        )
    elif twice:
        problem = "is in the list twice: fork it"
    if problem is not None:
        raise CacheMismatchError(f"Row {row} {problem}.")


def position_groups(model: PreTrainedModel, positions: Tensor) -> list[list[int]]:
    """Rows that may share a forward: all, unless the model turns keys by its longest position.

    Long RoPE takes other factors for the whole forward when one position lies beyond the original length; a row alone
    would not.
    """
    rows = list(range(len(positions)))
    rope = length_rope(model)
    if len(rows) < 2 or rope is None:
        return [rows]
    groups: dict[Factors, list[int]] = {}
    for row, position in enumerate(positions.tolist()):
        groups.setdefault(rope.factors(position + 1), []).append(row)
    return list(groups.values())


def _read_again(
    model: PreTrainedModel,
    caches: Items[RetrievalCache],
    token_ids: Tensor,
    places: Tensor,
    errors: dict[int, Exception],
) -> dict[int, Tensor]:
    """Logits (1, vocabulary) of rows whose text passes a switch of the rotary factors with its new token, by row: each
    is read again by itself. errors: gets those of rows that failed.
    """
    found: dict[int, Tensor] = {}
    if caches[0].rope is None:
        return found
    for row, (cache, position) in enumerate(zip(caches, places.tolist(), strict=True)):
        if goes_on(cache, position + 1, decoding=True):
            continue
        own = slice(row, row + 1)
        try:
            found[row] = forward(
                model, cache, token_ids[own, None], mask=None, position_ids=places[own, None], decoding=True
            )
        except Exception as error:
            errors[row] = error
            cache.batch.broken = f"{type(error).__name__}: {error}"
    return found


def _note_tokens(caches: Items[RetrievalCache], token_ids: Tensor, places: Tensor) -> None:
    """Ids and rotary factors of new tokens, one for each cache of a model whose factors depend on the length."""
    for cache, token, position in zip(caches, token_ids.tolist(), places.tolist(), strict=True):
        if cache.rope is not None and not cache.batch.broken:
            (sequence,) = cache.batch.sequences
            if len(sequence.token_ids) == cache.batch.columns - 1:
                sequence.token_ids.append(token)
            cache.batch.factors = cache.rope.after_token(cache.batch.factors, position + 1)


class RowsCache(Cache):
    """`past_key_values` of one forward of new tokens of rows: input_ids and position_ids (tokens, 1), no mask.

    A row with several has them one behind the other; they attend to each other causally. spans: the tokens of each row.

    Made for every forward; `finish` ends it. errors: what went wrong with a row, by its number. Its part of the
    logits means nothing then, and its cache is not used again.
    """

    def __init__(
        self, caches: Items[RetrievalCache], plans: StepPlans | None = None, counts: Items[int] | None = None
    ) -> None:
        """caches: of each row, of one model, one sequence each. plans: of the searches of the steps before; None: new.
        counts: new tokens of each row; None: one.

        Raises UnsupportedModelError, the layer named.
        """
        self.caches = list(caches)
        counts = [1] * len(self.caches) if counts is None else counts
        self.spans = [slice(*span) for span in pairwise(accumulate(counts, initial=0))]
        self.plans = StepPlans() if plans is None else plans
        self.errors: dict[int, Exception] = {}
        self._specs: dict[tuple[int, int | None], MaskSpec] = {}
        super().__init__(layers=[self._layer(number) for number in range(len(self.caches[0].layers))])
        for row, cache in enumerate(self.caches):
            try:
                cache.require_room(self.new_tokens(row))
            except Exception as error:
                self.fail(row, error)

    def _layer(self, number: int) -> Any:
        layers: list[Any] = [cache.layers[number] for cache in self.caches]
        if all(isinstance(layer, StateLayer) for layer in layers):
            return RowsState(layers)
        if all(isinstance(layer, CacheLayer) for layer in layers):
            return RowsLayer(self, number, layers)
        raise UnsupportedModelError(
            f"Layer {number} must be of one kind in the caches of all rows, got "
            f"{sorted({type(layer).__name__ for layer in layers})}; make the caches for one model."
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Note new keys and values (tokens, kv_heads, 1, dim) and return handles."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if not isinstance(layer, RowsLayer):
            raise CacheMismatchError(
                f"The model writes keys of layer {layer_idx}, which the caches of these rows do not have; make their "
                "caches for this model."
            )
        use_threads()
        return layer.update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row."""
        return max(cache.batch.columns for cache in self.caches)

    def spec_of(self, row: int, columns: int, spec: MaskSpec) -> MaskSpec:
        """The recipe `spec` of a layer for a row of `columns` columns; layers of one kind share it."""
        own = self._specs.get((row, spec.window))
        if own is None or own.q_offset != columns:
            own = self._specs[row, spec.window] = replace(
                spec, q_offset=columns, q_length=self.new_tokens(row), padding=None
            )
        return own

    def new_tokens(self, row: int) -> int:
        """How many a row has in this forward."""
        span = self.spans[row]
        return int(span.stop - span.start)

    def attend_exact(self, number: int, query: Tensor, scoring: Scoring) -> Partial | None:
        """query (tokens, q_heads, 1, head_dim) over what rows have in pages, for all at once; None without any."""
        exact = [cache.batch.paged_prefix for row, cache in enumerate(self.caches) for _ in range(self.new_tokens(row))]
        return self.plans.exact.attend(number, exact, query, scoring)

    def fail(self, row: int, error: Exception) -> None:
        """This row goes no further; the others do."""
        self.errors[row] = error
        self.caches[row].batch.broken = f"{type(error).__name__}: {error}"

    def finish(self) -> None:
        """The forward is over: states go back to the rows they belong to."""
        for layer in self.layers:
            if isinstance(layer, RowsState):
                layer.give_back()
        self.layers = []  # they refer back: what a row holds would stay until the garbage collector comes


class RowsLayer(PendingLayer):
    """One layer of all rows: takes what is new, attends row by row."""

    def __init__(self, rows: RowsCache, number: int, layers: list[CacheLayer]) -> None:
        super().__init__()
        self._rows, self._number, self._layers = rows, number, layers
        self.is_sliding = layers[0].is_sliding

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._check_new(key_states)
        return super().update(key_states, value_states)

    def _check_new(self, key_states: Tensor) -> None:
        """Require keys of (tokens, kv_heads, 1, dim). Raises CacheMismatchError."""
        tokens = self._rows.spans[-1].stop
        if key_states.shape[0] != tokens or key_states.shape[2] != 1:
            raise CacheMismatchError(
                f"A forward with a RowsCache takes {tokens} new tokens for its {len(self._layers)} rows, got keys "
                f"{tuple(key_states.shape)}; read longer prompts with the cache of one row."
            )

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        spec: MaskSpec,
        *,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """Each row's new tokens to its own: query (tokens, q_heads, 1, head_dim), float32 of value_dim out."""
        key, value = self.take_pending(module)
        out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float32, device=query.device)
        together: list[tuple[int, RetrievalLayer]] = []
        on_host = query.device.type == "cpu"
        exact = self._rows.attend_exact(self._number, query, Scoring(scale, softcap)) if not self.is_sliding else None
        for row, layer in enumerate(self._layers):
            own = self._rows.spans[row]
            if row in self._rows.errors:
                continue
            single = own.stop - own.start == 1
            if single and on_host and isinstance(layer, RetrievalLayer) and layer.decodes_plainly():
                together.append((own.start, layer))
                continue
            try:
                layer.update(_as_block(key[own]), _as_block(value[own]))
                if exact is not None and isinstance(layer, RetrievalLayer):
                    layer.exact_part = Partial(_as_block(exact.out[own]), exact.lse[own].transpose(0, 2))
                place, before = self._rows.spec_of(row, layer.columns, spec), layer.stats.host_seconds
                with nullcontext() if single else layer.batch.retrieving():
                    found = layer.attend(
                        module, _as_block(query[own]), place, scale=scale, softcap=softcap, sink_logits=sink_logits
                    )
                out[own] = _as_block(found)
                self._rows.plans.host_seconds += layer.stats.host_seconds - before
            except Exception as error:
                self._rows.fail(row, error)
        if together:
            row_of = {span.start: row for row, span in enumerate(self._rows.spans)}
            found, errors = decode_batch(
                self._rows.plans,
                together,
                module,
                DecodeTokens(query, key, value, spec),
                Scoring(scale, softcap),
                sink_logits,
                exact,
            )
            for token, problem in errors.items():
                self._rows.fail(row_of[token], problem)
            if len(together) == len(query):
                return found
            tokens = [token for token, _ in together]
            out[tokens] = found[tokens]
        return out

    def get_seq_length(self) -> int:
        return self._rows.get_seq_length()


def _as_block(part: Tensor) -> Tensor:
    """Return (tokens, heads, 1, dim) as (1, heads, tokens, dim), and the other way round: a view."""
    return part.transpose(0, 2)
