"""AnswerLoop: from token ids that a cache is to continue with to answers, for one sequence or a batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from retrieval_attn.answer import Answer, HeadShare, Stats
from retrieval_attn.attention.cache import RetrievalCache, form_beside, retrieves
from retrieval_attn.attention.sequence import ids_tensor
from retrieval_attn.attention.source import largest_share, mean_share
from retrieval_attn.errors import InputDataError, UnsupportedModelError
from retrieval_attn.memory.host_room import host_shortage
from retrieval_attn.model.image_embedding import PromptImages
from retrieval_attn.model.multimodal import placeholders
from retrieval_attn.model.placement import input_device
from retrieval_attn.prompt.text_stream import TextStream
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import (
    ChooseTokens,
    DecodeSteps,
    Generated,
    PromptState,
    StopStrings,
    TokenChoice,
    forward,
    positions,
    run,
)
from retrieval_attn.runner.drafted_steps import DraftedSteps, drafted_steps
from retrieval_attn.runner.exact_steps import ExactSteps, exact_steps
from retrieval_attn.runner.full_attention import attach_full_kv, release_if_needed
from retrieval_attn.runner.prefill import abandon, finish_prefill
from retrieval_attn.runner.progress import ReadingBar
from retrieval_attn.runner.ready import compilation, make_ready, move_experts, prepared
from retrieval_attn.sampling.sampler import History, Sampler, TokenScore, require_known, token_scores
from retrieval_attn.sampling.sampling_params import Sampling


class Cancelled(Exception):
    """The answer was cancelled while its question was read."""


@dataclass(frozen=True, eq=False)
class PromptRows:
    """Sequences side by side, on the model's device: ids int64 and valid bool, both (batch, columns).

    Columns that are not valid are padding. scored: `AnswerLoop.read` returns a score of each new token but the first
    one, with `scored` of the likeliest tokens; of one sequence. None: of none.
    """

    ids: Tensor
    valid: Tensor
    scored: int | None = None

    def first(self, columns: int) -> PromptRows:
        """The first `columns` columns, a view."""
        return PromptRows(self.ids[:, :columns], self.valid[:, :columns])


class AnswerLoop:
    """Share the steps of all answers of one model: read token ids, decode, cut at stop strings and count costs."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer

    @property
    def vocabulary(self) -> int:
        """Ids that the model has embeddings for."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    def batch(self, rows: Sequence[list[int]], before: Sequence[int] = ()) -> PromptRows:
        """Every row after the same ids `before`, with padding in front of the shorter rows.

        Raises InputDataError for ids that stand for images: only the model's processor can say which.
        """
        for token, kind in placeholders(self.model).items():
            if any(token in row for row in rows):
                raise InputDataError(
                    f"The text has the token {token}, which stands for a part of some {kind}; only text is read here. "
                    f"Take it out, or call model.generate with what the model's processor returns and "
                    "past_key_values=retrieval_attn.RetrievalCache(model)."
                )
        longest = max(map(len, rows))
        pads = [longest - len(row) for row in rows]
        ids = torch.full((len(rows), len(before) + longest), self._pad)
        ids[:, : len(before)] = ids_tensor(before)
        valid = torch.ones(ids.shape, dtype=torch.bool)
        for number, (pad, row) in enumerate(zip(pads, rows, strict=True)):
            valid[number, len(before) : len(before) + pad] = False
            ids[number, len(before) + pad :] = torch.tensor(row, dtype=torch.int64)
        device = input_device(self.model)
        return PromptRows(ids.to(device), valid.to(device))

    def read(self, cache: RetrievalCache, batch: PromptRows) -> PromptState:
        """Run the model over the columns of `batch` that `cache` does not hold yet.

        Raises what a forward raises: ContextLengthError, MemoryPlanError, CacheMismatchError.
        """
        past, images = cache.get_seq_length(), cache.batch.images
        mask = None if bool(batch.valid.all()) else batch.valid
        place = positions(batch.valid)[:, past:]
        every, scores, new = batch.scored is not None, list[TokenScore](), batch.ids[:, past:]
        more: dict[str, Any] = {}
        if images is not None:
            cache.index.make_room_for_image(images.most_tokens(past, batch.ids.shape[1]))
            new, place, more = images.inputs(new, place, past, cache.on_image)
        with torch.no_grad(), using_retrieval(self.model, cache.config.prefill_chunk):
            logits = forward(self.model, cache, new, mask=mask, position_ids=place, every=every, more=more)
            if batch.scored is not None:
                scores = token_scores(logits[0, :-1], new[0, 1:], batch.scored)
                logits = logits[:, -1].float().clone()  # without a hold on those of the other columns
        last = place.reshape(-1, *new.shape)[:, :, -1].amax(dim=0)  # of three axes the farthest
        return PromptState(batch.ids, logits, last, mask, scores)

    def read_whole(
        self,
        cache: RetrievalCache,
        batch: PromptRows,
        progress: bool = False,
        read_done: Callable[[], object] | None = None,
    ) -> PromptState:
        """Read as `read` does, then block until all keys are on the host and indexed and the first answer compiles and
        captures nothing; show a bar if `progress`. read_done: called after the model has read, before the rest is
        awaited. Raises MemoryPlanError if host memory runs out, too.
        """
        with host_shortage(f"read {batch.ids.shape[1]:,} tokens"):
            release_if_needed(self.model)
            tokens = int(batch.valid[:, cache.get_seq_length() :].sum())
            with (
                compilation(self.model, cache, batch.ids.shape[1], progress=progress) as compiling,
                prepared(self.model, cache, compiling),
                ReadingBar(cache, f"reading {tokens:,} tokens", progress) as bar,
            ):
                state = self.read(cache, batch)
                if read_done is not None:
                    read_done()
                bar.wait()
                finish_prefill(cache, bar.show)
            move_experts(self.model)
            with using_retrieval(self.model, cache.config.prefill_chunk):
                answering = attach_full_kv(self.model, cache)
                make_ready(self.model, cache if answering is None else answering)
            return state

    def answer(
        self,
        cache: RetrievalCache,
        batch: PromptRows,
        sampling: Sampling,
        on_text: Callable[[str], None] | None = None,
        cancelled: threading.Event | None = None,
    ) -> list[Answer]:
        """Read the rest of `batch` into `cache` and generate after it: one answer for each row.

        on_text: called with each new piece of the first row's text. cancelled: read after each layer of the prefill
        (Cancelled is raised then) and after each token (the answers end there). The cache goes on with the generated
        tokens: fork it before if it is still needed. Raises InputDataError for a logit bias of a token that the model
        does not have, UnsupportedModelError for scores that are not finite.
        """
        started, ends = time.perf_counter(), set[int]() if sampling.ignore_eos else self.eos
        chooser = self._chooser(sampling, batch, ends, cache.batch.images)
        with (
            host_shortage(f"answer after {batch.ids.shape[1]:,} tokens"),
            using_retrieval(self.model, cache.config.prefill_chunk),
        ):
            held = (batch.first(cache.get_seq_length()).valid.sum(dim=1) - cache.batch.forgotten.tokens).tolist()
            with _cancellable(cache, cancelled):
                prompt = self.read(cache, batch)
            _require_numbers(torch.isnan(prompt.logits))
            prefill_seconds = time.perf_counter() - started
            emit = None if on_text is None else _FirstRow(self._text_stream(sampling), ends, on_text)
            choose = None if chooser is None else chooser()
            choice = TokenChoice(self._criteria(sampling, batch, ends), choose, pad_id=self._pad)
            steps: DecodeSteps | None
            if cache.batch.attends_to_all:
                steps = exact_steps(self.model, cache, batch.ids, sampling.max_new_tokens, chooser)
            else:
                steps = drafted_steps(self.model, cache, batch.ids, sampling.max_new_tokens)
            result = run(self.model, cache, prompt, choice, on_token=emit, cancelled=cancelled, steps=steps)
            if emit is not None:
                emit.end()
            result.prefill_seconds = prefill_seconds
            stats = _stats(result, cache, steps)
            rows = result.sequences[:, batch.ids.shape[1] :].tolist()
            return [
                self._answer(row, replace(stats, context_tokens=tokens), sampling, ends)
                for row, tokens in zip(rows, held, strict=True)
            ]

    def _answer(self, row: list[int], stats: Stats, sampling: Sampling, ends: set[int]) -> Answer:
        ended = next((place for place, token in enumerate(row) if token in ends), None)
        tokens = row if ended is None else row[:ended]
        stream = self._text_stream(sampling)
        if sampling.stop:
            text = "".join([*map(stream.add, tokens), stream.end()])
        else:
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        stopped = ended is not None or stream.stopped
        while ended is None and stopped and tokens[-1] == self._pad:
            tokens = tokens[:-1]  # other rows went on after the one that a string ended
        return Answer(text, tokens, "stop" if stopped else "length", stats)

    def _text_stream(self, sampling: Sampling) -> TextStream:
        return TextStream(self.tokenizer, sampling.stop, sampling.min_tokens)

    def _criteria(self, sampling: Sampling, batch: PromptRows, ends: set[int]) -> StoppingCriteriaList:
        """ends: ids that end an answer."""
        criteria = StoppingCriteriaList([MaxLengthCriteria(batch.ids.shape[1] + sampling.max_new_tokens)])
        if ends:
            criteria.append(EosTokenCriteria(sorted(ends)))
        if sampling.stop:
            criteria.append(StopStrings([self._text_stream(sampling) for _ in batch.ids]))
        return criteria

    def _chooser(
        self, sampling: Sampling, batch: PromptRows, ends: set[int], images: PromptImages | None
    ) -> Callable[[], ChooseTokens] | None:
        """Return a maker of samplers of these rows, which choose alike and each know the tokens that they are called
        with; None: each row takes the likeliest token of the model's logits.
        """
        rows, columns = batch.ids.shape
        random = sampling.seed is None and not sampling.greedy
        seeds = torch.randint(2**63 - 1, (rows,)).tolist() if random else [sampling.seed or 0] * rows
        params = [sampling.params(seed) for seed in seeds]
        require_known(params[0], self.vocabulary)
        prompts = [row[valid].cpu().numpy() for row, valid in zip(batch.ids, batch.valid, strict=True)]
        if images is not None:
            prompts = [np.asarray(images.encoder.reader.plain(row.tolist())) for row in prompts]

        def made_histories() -> list[History | None]:
            given = zip(params, prompts, strict=True)
            return [History.of(one, prompt, [], ends, sampling.min_tokens) for one, prompt in given]

        if sampling.greedy and not any(made_histories()):
            return None

        def chooser() -> ChooseTokens:
            histories, known = made_histories(), columns
            sampler = Sampler(rows, batch.ids.device)
            sampler.assign(dict(enumerate(params)))

            def choose(sequences: Tensor, logits: Tensor, position: Tensor) -> Tensor:
                nonlocal known
                if any(histories):
                    for history, new in zip(histories, sequences[:, known:].tolist(), strict=True):
                        if history is not None:
                            history.output.extend(new)
                    known = sequences.shape[1]
                chosen = sampler.choose(logits, position, histories)
                _require_numbers(chosen.failed)
                return chosen.ids

            return choose

        return chooser

    @property
    def eos(self) -> set[int]:
        """Ids that end an answer: those of the generation config, and the tokenizer's end token."""
        configured = self.model.generation_config.eos_token_id if self.model.generation_config else None
        given = configured if isinstance(configured, list | tuple) else (configured,)
        return {*given, self.tokenizer.eos_token_id} - {None}

    @property
    def _pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else next(iter(sorted(self.eos)), 0)


class _FirstRow:
    """Sends the text of a batch's first row on, piece by piece, until the row ends."""

    def __init__(self, text: TextStream, eos: set[int], on_text: Callable[[str], None]) -> None:
        self._text, self._eos, self._on_text = text, eos, on_text
        self._ended = False

    def __call__(self, new: list[int]) -> None:
        self._ended = self._ended or new[0] in self._eos
        if not self._ended:
            self._send(self._text.add(new[0]))

    def end(self) -> None:
        """Send what was held back."""
        self._send(self._text.end())

    def _send(self, piece: str) -> None:
        if piece:
            self._on_text(piece)


@contextmanager
def _cancellable(cache: RetrievalCache, cancelled: threading.Event | None) -> Iterator[None]:
    """Reading into `cache` stops after the layer in which `cancelled` is set: Cancelled is raised."""

    def look() -> None:
        if cancelled is not None and cancelled.is_set():
            raise Cancelled

    cache.on_layer = look
    try:
        yield
    except Cancelled:
        abandon(cache)
        raise
    finally:
        cache.on_layer = None


def _require_numbers(failed: Tensor) -> None:
    """Raise UnsupportedModelError if any is True: no token can be chosen among scores that are not finite."""
    if bool(failed.any()):
        raise UnsupportedModelError(
            "The model's scores of the next token are NaN or infinite: its weights, or its keys and values, hold NaN "
            "or infinity. Check the weights, or load them in a wider dtype such as bfloat16 or float32."
        )


def _stats(result: Generated, cache: RetrievalCache, steps: DecodeSteps | None) -> Stats:
    counts = steps.drafts.length if isinstance(steps, DraftedSteps) else None
    exact = steps if isinstance(steps, ExactSteps) else None
    work, tails = cache.stats(), {} if cache.batch.attends_to_all else cache.tail_shares()
    largest = largest_share(tails)
    return Stats(
        context_tokens=0,
        new_tokens=result.new_tokens,
        prefill_seconds=result.prefill_seconds,
        decode_seconds=result.decode_seconds,
        index_seconds=work.index_seconds,
        host_seconds=work.host_seconds,
        keys_scanned=work.keys_scanned,
        host_bytes_read=work.bytes_read,
        host_bytes=cache.host_nbytes,
        device_bytes=cache.device_nbytes,
        search_seconds=work.search_seconds,
        attend_seconds=work.attend_seconds,
        indexes=cache.index_kinds() if retrieves(cache) else {},
        all_keys=form_beside(cache),
        tail_share=mean_share(tails),
        tail_share_most=None if largest is None else HeadShare(*largest),
        decoded=result.how,
        drafted_tokens=0 if counts is None else counts.drafted,
        accepted_tokens=0 if counts is None else counts.accepted,
        passes=0 if exact is None else exact.passes,
        pass_bytes=0 if exact is None else exact.bytes_read // max(1, exact.passes),
        agreement=None if exact is None else exact.length.agreement,
    )
