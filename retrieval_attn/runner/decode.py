"""The token loop: one forward for what is new, then one forward per generated token.

Shared by `retrieval_attn.generate` (inside transformers' generate) and `Context`. It feeds positions explicitly, so
that padded rows and rows whose padding lies in the middle continue where they stopped. On a GPU the forwards of
generated tokens are replays of one graph (`runner/graph/pool.py`), where the model allows it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.reread import whole_text
from retrieval_attn.attention.sequence import add_ids
from retrieval_attn.config import GraphMode
from retrieval_attn.errors import BackendError, CaptureError
from retrieval_attn.model.placement import agreed, input_device
from retrieval_attn.model.rope import counting_as
from retrieval_attn.offload.threads import foreground
from retrieval_attn.prompt.text_stream import TextStream
from retrieval_attn.runner.graph.pool import GraphPool, acquire, release
from retrieval_attn.runner.graph.sequence_slot import WindowsGrownError
from retrieval_attn.runner.graph.support import runtime_for
from retrieval_attn.sampling.sampler import TokenScore


class TokenCopy:
    """Copies numbers from the device; what is launched after `send` does not delay them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._numbers = torch.empty(0, dtype=torch.int64)
        self._sent = torch.cuda.Event() if self._cuda else None

    def send(self, numbers: Tensor) -> None:
        """Begin to copy them, int64 of any shape. Those sent before must have been read."""
        if self._sent is None:
            self._numbers = numbers.clone()
            return
        if self._numbers.shape != numbers.shape:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._sent.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[int]:
        """Wait for the numbers that were sent last."""
        if self._sent is not None:
            self._sent.synchronize()
        return list(self._numbers.tolist())


class StopStrings(StoppingCriteria):
    """Ends rows at the stop strings of their streams; reads ids on the CPU, each column once."""

    def __init__(self, streams: Sequence[TextStream]) -> None:
        """streams: of each row, without a token."""
        self._streams = streams

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor | None, **_: Any) -> torch.BoolTensor:
        """Return bool (rows,): which rows have ended. Called once for each token."""
        for stream, token in zip(self._streams, input_ids[:, -1].tolist(), strict=True):
            stream.add(token)
        ended = torch.tensor([stream.stopped for stream in self._streams], device=input_ids.device)
        return ended  # type: ignore[return-value]  # declared BoolTensor


class Lookahead:
    """Reads the tokens of a device that takes the likeliest one itself and begins the next step with it.

    Nothing of the loop then lies between two steps of the device: the CPU evaluates what ends a text while the next
    step runs. Only for criteria of transformers itself: others may need what is on the device.
    """

    CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria, StopStrings)

    def __init__(
        self,
        steps: DecodeSteps,
        token_copy: TokenCopy,
        criteria: StoppingCriteriaList,
        cancelled: threading.Event,
        sequences: Tensor,
    ) -> None:
        self._steps, self._token_copy, self._criteria, self._cancelled = steps, token_copy, criteria, cancelled
        self._ids, self._columns = sequences.cpu(), sequences.shape[1]
        self._max_columns = min(
            (one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)), default=None
        )
        self.stopped = torch.zeros(sequences.shape[0], dtype=torch.bool)

    @classmethod
    def serves(cls, criteria: StoppingCriteriaList) -> bool:
        """Whether it can evaluate all of them."""
        return all(type(one) in cls.CRITERIA for one in criteria)

    def note(self, token: list[int]) -> None:
        """Note the id of every row that the caller has read itself."""
        if self._columns == self._ids.shape[1]:
            more = max(64, self._columns)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(len(self._ids), more)], dim=1)
        self._ids[:, self._columns] = torch.tensor(token)
        self._columns += 1

    def follow(self, on_token: Callable[[list[int]], None]) -> Tensor:
        """Read what the launched step chooses, and so on until a row ends or the device has to wait for the caller.

        on_token gets the ids of each row. Returns all ids, (batch, n) on the CPU; `stopped` says which rows have ended.
        No step is launched at the end. Raises BackendError once all tokens before the failed step are read.
        """
        begun, launched, failed = self._columns, True, None
        while launched and not self.stopped.any():
            chosen = self._steps.chosen
            assert chosen is not None
            self._token_copy.send(chosen)
            try:
                launched = self._columns + 1 != self._max_columns and self._steps.launch_next()
            except BackendError as error:
                launched, failed = False, error  # of the next token: this one is read first
            token = self._token_copy.read()
            self._steps.confirm()
            self.note(token)
            on_token(token)
            self.stopped = self._criteria(self._ids[:, : self._columns], None)
            if self._cancelled.is_set():
                self.stopped = torch.ones_like(self.stopped)
        if failed is not None and not self.stopped.all():
            raise failed
        if launched:
            self._steps.discard()
        return self._ids[:, begun : self._columns]


logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PromptState:
    """State that the token loop continues: a cache holds the prompt's tokens, and this is the rest.

    sequences: (batch, columns) ids so far, which processors and criteria see. logits: (batch, vocabulary) float32 of
    the next token. position: int64 (batch,) of the last real token. mask: (batch, cached columns) bool, None without
    padding. All on the model's input device. scores: see `PromptRows.scored`.
    """

    sequences: Tensor
    logits: Tensor
    position: Tensor
    mask: Tensor | None = None
    scores: Sequence[TokenScore] = ()


ChooseTokens = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns the next token of every row, int64 (batch,), of sequences int64 (batch, columns), logits float32 (batch,
vocabulary), which the next step overwrites, and the position int64 (batch,) of that token."""


@dataclass(frozen=True, eq=False)
class TokenChoice:
    """How a token is chosen from logits, and when a row ends.

    choose: see `ChooseTokens`; None: the likeliest token, which a captured step chooses itself. pad_id: fills rows that
    have ended.
    """

    criteria: StoppingCriteriaList
    choose: ChooseTokens | None = None
    pad_id: int = 0


@dataclass
class Generated:
    """Output of a token loop.

    sequences: (batch, prompt + new) ids; rows that stopped early are filled with the pad id.
    how: "graph" where every forward after the prompt's was a replay, "eager", or "eager: " and why there was no graph.
    """

    sequences: Tensor
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    how: str = "eager"


def positions(valid: Tensor) -> Tensor:
    """Position of every column of a (batch, columns) mask: real tokens count 0, 1, ...; padding gets 1.

    transformers gives padded columns position 1; nothing attends to them.
    """
    counted = valid.long().cumsum(dim=1) - 1
    return counted.masked_fill(~valid.bool(), 1)


def forward(
    model: PreTrainedModel,
    cache: RetrievalCache,
    ids: Tensor | None,
    *,
    mask: Tensor | None,
    position_ids: Tensor,
    inputs_embeds: Tensor | None = None,
    every: bool = False,
    decoding: bool = False,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Tensor:
    """Run `model` on new tokens and return the last column's logits, (batch, vocabulary) float32.

    mask: (batch, all columns) bool or None without padding; position_ids: (batch, new). every: return the logits of all
    new columns, (batch, new, vocabulary), in the model's dtype. decoding: the new tokens are generated ones, one for
    each row. more: further arguments of the model. A text that passes a switch of the model's rotary factors is read
    again, whole (`attention/reread.py`): raises CacheMismatchError if its ids are not known.
    """
    changes = isinstance(cache, RetrievalCache) and cache.rope is not None
    if changes:
        ids, position_ids = whole_text(cache, ids, mask, position_ids, decoding=decoding)
    arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "attention_mask": mask, **more}
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters:
        arguments["position_ids"] = position_ids
    if "logits_to_keep" in parameters:
        arguments["logits_to_keep"] = 0 if every else 1  # 0 is all of them
    if inputs_embeds is not None:
        arguments["inputs_embeds"] = inputs_embeds
    else:
        arguments["input_ids"] = ids
    with counting_as(cache.prompt_length) if changes else contextlib.nullcontext():
        logits: Tensor = model(**arguments, return_dict=True).logits
    if changes and ids is not None:
        add_ids(cache.batch, ids)
    return logits if every else logits[:, -1].float()


class DecodeSteps:
    """Forwards of one new token per row, as replays of a graph where that can be, else eagerly. Close it at the end.

    replays: how many were. reason: why there was no graph, or "".
    """

    def __init__(self, model: PreTrainedModel, cache: RetrievalCache, graph: GraphMode | None = None) -> None:
        """graph: as `Config.graph`; None: what the cache's options say. Nothing is captured before the first step."""
        self._model, self._cache = model, cache
        self._graph = cache.config.graph if graph is None else graph
        self.pool: GraphPool | None = None
        self._eager = self._graph is False
        self.replays = 0
        self.reason = ""

    def step(self, token: Tensor, position: Tensor, mask: Tensor | None) -> Tensor:
        """Logits (batch, vocabulary) float32 after token (batch,) at position (batch,). mask: as `forward` takes it.

        They may be overwritten by the next step, before which the caller reads something that was computed from them,
        and calls `confirm`. Raises CaptureError if a graph was demanded and cannot be.
        """
        foreground.note()
        if not self._eager and self.pool is None:
            self._acquire()
        if self.pool is not None:
            try:
                logits = self._replayed(self.pool, token, position)
            except CaptureError as error:
                self._fail(str(error))
            else:
                self.replays += 1
                return logits
        place = position[:, None]
        return forward(self._model, self._cache, token[:, None], mask=mask, position_ids=place, decoding=True)

    @property
    def chosen(self) -> Tensor | None:
        """The likeliest token (batch,) on the device after the last step; None after an eager one."""
        return None if self.pool is None else self.pool.chosen

    def launch_next(self) -> bool:
        """Launch the step of `chosen` before it is read and confirmed, one step ahead; False if that is impossible.

        `confirm` then confirms one after the other. Raises BackendError as `step` does.
        """
        launched = self.pool is not None and self.pool.launch_ahead()
        self.replays += launched
        return launched

    def discard(self) -> None:
        """Discard the steps that are not confirmed."""
        if self.pool is not None:
            self.pool.undo()

    def confirm(self) -> None:
        """Commit the oldest step that is not confirmed. Raises BackendError if a host search in it failed, the layer
        named.
        """
        if self.pool is not None:
            self.pool.confirm()

    def note(self, token: list[int]) -> None:
        """Note the new id of every row, before its step."""

    def close(self) -> None:
        """Put every confirmed token into the cache. Safe at any time, also after an interrupted step."""
        if self.pool is not None:
            pool, self.pool = self.pool, None
            release(self._model, pool)

    def _replayed(self, pool: GraphPool, token: Tensor, position: Tensor) -> Tensor:
        """The step of a graph, or of another one where windows have outgrown its memory. Raises CaptureError."""
        try:
            return pool.launch(self._cache, token, position)
        except WindowsGrownError:
            self.close()
            self._acquire()
            if self.pool is None:
                raise
            return self.pool.launch(self._cache, token, position)

    def _acquire(self) -> None:
        try:
            runtime = runtime_for(self._model)
            if runtime is None:
                if self._graph == "auto":
                    self._eager = True  # on a CPU a graph gains nothing: nothing to report
                    return
                raise CaptureError(f"a graph needs a CUDA device, the model runs on {input_device(self._model)}")
            self.pool = acquire(self._model, self._cache, runtime)
        except (CaptureError, BackendError) as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        """Go on eagerly, logged once for a model and reason; or raise, where a graph was demanded."""
        self._eager, self.reason = True, reason
        self.close()
        if self._graph is True:
            raise CaptureError(f'this step cannot run as a graph: {reason}. Use graph="auto" or graph=False.')
        note_eager(self._model, reason)


def note_eager(model: PreTrainedModel, reason: str) -> None:
    """Say in the log, once for a model and reason, why there is no graph."""
    logged = _logged.setdefault(model, set())
    if reason not in logged:
        logged.add(reason)
        logger.warning("decoding eagerly, without a CUDA graph: %s", reason)


_logged: weakref.WeakKeyDictionary[PreTrainedModel, set[str]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def run(
    model: PreTrainedModel,
    cache: RetrievalCache,
    prompt: PromptState,
    choice: TokenChoice,
    *,
    on_token: Callable[[list[int]], None] | None = None,
    cancelled: threading.Event | None = None,
    graph: GraphMode | None = None,
    steps: DecodeSteps | None = None,
) -> Generated:
    """Generate until every row meets a criterion, or until `cancelled` is set.

    on_token gets the new id of every row, pad for rows that stopped. cancelled: looked at after each token, when
    `on_token` has it; the loop then ends as if every row had met a criterion. The last token is not fed back:
    the cache then holds one column less than `sequences`, as transformers leaves it. graph: see `Config.graph`; None:
    what the cache's options say. steps: of this model and cache, which the loop closes; None: `DecodeSteps`. Raises
    BackendError if the host's search failed, CaptureError for graph=True without
    one.
    """
    started = time.perf_counter()
    sequences, logits, position, mask = prompt.sequences, prompt.logits, prompt.position, prompt.mask
    criteria = choice.criteria
    cancelled = cancelled or threading.Event()
    batch = sequences.shape[0]
    running = torch.ones(batch, dtype=torch.bool, device=sequences.device)
    result = Generated(sequences, 0, 0.0, 0.0)
    steps, token_copy = steps or DecodeSteps(model, cache, graph), TokenCopy(sequences.device)
    plain = choice.choose is None and Lookahead.serves(criteria)
    lookahead = Lookahead(steps, token_copy, criteria, cancelled, sequences) if plain else None

    def emit(token: list[int]) -> None:
        result.new_tokens += 1
        steps.note(token)
        if on_token is not None:
            on_token(token)

    try:
        while True:
            if choice.choose is None:
                chosen = logits.argmax(dim=-1)
            else:
                chosen = agreed(choice.choose(sequences, logits, position + 1), model)
            chosen = torch.where(running, chosen, choice.pad_id)
            sequences = torch.cat([sequences, chosen[:, None]], dim=1)
            running = running & ~criteria(sequences, None)
            # here, and where the lookahead reads a token, the CPU waits for the device
            token_copy.send(torch.cat([chosen, running.to(chosen.dtype)]))
            numbers = token_copy.read()
            steps.confirm()
            emit(numbers[:batch])
            if not any(numbers[batch:]) or cancelled.is_set():
                break
            position = position + 1
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(batch, 1)], dim=1)
            logits = steps.step(chosen, position, mask)
            if lookahead is None:
                continue
            lookahead.note(numbers[:batch])
            while steps.chosen is not None and all(numbers[batch:]) and not lookahead.stopped.any():
                new = lookahead.follow(emit).to(sequences.device)
                sequences = torch.cat([sequences, new], dim=1)
                if lookahead.stopped.all():
                    break
                running, position = ~lookahead.stopped.to(sequences.device), position + new.shape[1]
                if mask is not None:
                    mask = torch.cat([mask, mask.new_ones(new.shape)], dim=1)
                logits = steps.step(sequences[:, -1], position, mask)
            if lookahead.stopped.all():
                break
    finally:
        steps.close()
    if steps.reason:
        result.how = f"eager: {steps.reason}"
    elif steps.replays:
        result.how = "graph"
    result.sequences = sequences
    result.decode_seconds = time.perf_counter() - started
    return result
