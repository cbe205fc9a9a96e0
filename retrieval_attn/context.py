"""Context: a long text that is read and indexed once and asked many times."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from retrieval_attn.answer import Answer, Sampling, Stats
from retrieval_attn.cache.cache import RetrievalCache
from retrieval_attn.cache.retrieval import RetrievalLayer
from retrieval_attn.config import Config, resolve
from retrieval_attn.cpu import prepare
from retrieval_attn.engine.decode import Generated, PromptState, TokenChoice, forward, positions, run
from retrieval_attn.engine.prefill import finish_prefill
from retrieval_attn.engine.switch import enabled_config, using_retrieval
from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.model.placement import input_device
from retrieval_attn.offload.transfer import host_format
from retrieval_attn.template import PromptTemplate

Append = Literal["exact", "retrieval"]


class Context:
    """One document in a model's memory: read once, then asked, extended and forked.

    The keys and values live on the host; forks and questions share them. A question never changes the
    context: it continues a fork. Use one thread per model at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: Config | None = None,
        **overrides: Any,
    ) -> None:
        """An empty context of `model`. Raises UnsupportedModelError or ConfigError."""
        self.model = model
        self.tokenizer = tokenizer
        self.config = resolve(config if config is not None else enabled_config(model), overrides)
        self.template = PromptTemplate.of(tokenizer)
        self._cache = RetrievalCache(model, self.config)
        self._ids: list[int] = []
        self.read_seconds = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of the context, template and begin-of-sequence token included."""
        return len(self._ids)

    @property
    def cache(self) -> RetrievalCache:
        """The cache that holds this context (fork it before generating with it)."""
        return self._cache

    def read(self, text: str | Sequence[int], *, progress: bool = True) -> Context:
        """Prefill and index `text` (or token ids, taken as they are), layer by layer. Returns self, indexes ready.

        A string gets the template's opening: the begin-of-sequence token and, for chat models, the start of the
        user's turn. A bar shows the layers when reading takes longer than two seconds.
        Raises InputDataError for an empty text or a context that was read already, ContextLengthError.
        """
        if self._ids:
            raise InputDataError(
                f"This context holds {len(self._ids)} tokens already; use extend() to append, or a new Context."
            )
        ids = self.template.context_ids(text) if isinstance(text, str) else [int(token) for token in text]
        self._append(ids, progress)
        return self

    def extend(self, text: str | Sequence[int], *, progress: bool = True) -> Context:
        """Append more text or token ids; they attend to the whole context as config.exact_append says."""
        if not self._ids:
            return self.read(text, progress=progress)
        ids = self.template.plain_ids(text) if isinstance(text, str) else [int(token) for token in text]
        self._append(ids, progress)
        return self

    def fork(self) -> Context:
        """An independent copy that shares the host's keys, values and indexes."""
        other = object.__new__(Context)
        other.__dict__.update(self.__dict__)
        other._cache = self._cache.fork()
        other._ids = list(self._ids)
        return other

    def ask(
        self,
        question: str,
        *,
        raw: bool = False,
        append: Append | None = None,
        on_text: Callable[[str], None] | None = None,
        **sampling: Any,
    ) -> Answer:
        """Answer one question about the context, which stays as it was.

        raw: take `question` as the exact continuation of the context; otherwise it is put into the chat
        template, or for models without one into "Question: ... Answer:".
        append: how the question's own tokens attend to the context, "exact" or "retrieval" (default: what
        config.exact_append says). on_text: called with each new piece of text.
        sampling: fields of Sampling (max_new_tokens, temperature, ...). Raises InputDataError, ConfigError.
        """
        return self._answer([self._question_ids(question, raw)], append, _sampling(sampling), on_text)[0]

    def ask_many(
        self, questions: Sequence[str], *, raw: bool = False, append: Append | None = None, **sampling: Any
    ) -> list[Answer]:
        """Answer several questions in one batch. The context's keys are held, and scanned, once for all."""
        if isinstance(questions, str) or not questions:
            raise InputDataError(f"ask_many needs a non-empty list of questions, got {questions!r}; use ask() for one.")
        asked = [self._question_ids(question, raw) for question in questions]
        return self._answer(asked, append, _sampling(sampling), None)

    def continue_with(self, ids: Sequence[int], **sampling: Any) -> Answer:
        """Generate after `ids`, taken as they are: they continue the context, which stays as it was."""
        return self._answer([list(ids)], None, _sampling(sampling), None)[0]

    def stream(self, question: str, **options: Any) -> Iterator[str]:
        """Like `ask`, yielding pieces of text as they are generated."""
        pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                self.ask(question, on_text=pieces.put, **options)
                pieces.put(None)
            except BaseException as error:
                pieces.put(error)

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        while (piece := pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
        worker.join()

    # -- inside -------------------------------------------------------------------------------------

    def _append(self, ids: list[int], progress: bool) -> None:
        if not ids:
            raise InputDataError("The text has no tokens; give a non-empty string or list of token ids.")
        vocabulary = self._vocabulary
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise InputDataError(
                f"Token ids must be in [0, {vocabulary}) for this model, got {min(ids)} to {max(ids)}; tokenize with "
                "the model's own tokenizer."
            )
        self._cache.require_room(len(ids))
        self._prepare(len(ids))
        started = time.perf_counter()
        with _progress(self._cache, f"reading {len(ids):,} tokens", progress):
            start = len(self._ids)
            place = torch.arange(start, start + len(ids), device=input_device(self.model))[None]
            with torch.no_grad(), using_retrieval(self.model, self.config.prefill_chunk):
                forward(self.model, self._cache, self._tensor([ids]), mask=None, position_ids=place)
        with _progress(self._cache, "waiting for the last indexes", progress):
            finish_prefill(self._cache, self._cache.on_layer)
        self._ids += ids
        self.read_seconds += time.perf_counter() - started
        self._cache.batch.note_ids(torch.tensor([self._ids]))

    def _question_ids(self, question: str, raw: bool) -> list[int]:
        return self.template.plain_ids(question) if raw else self.template.question_ids(question)

    def _answer(
        self,
        asked: list[list[int]],
        append: Append | None,
        sampling: Sampling,
        on_text: Callable[[str], None] | None,
    ) -> list[Answer]:
        if not self._ids:
            raise InputDataError("The context is empty; call read(text) first.")
        if not all(asked):
            raise InputDataError("A question has no tokens; ask a non-empty question.")
        longest = max(len(ids) for ids in asked)
        self._cache.require_room(longest + sampling.max_new_tokens)
        cache = self._cache.fork()
        if append is not None:
            _set_append(cache, append)
        if len(asked) > 1:
            cache.batch_repeat_interleave(len(asked))
        started = time.perf_counter()
        with torch.no_grad(), using_retrieval(self.model, self.config.prefill_chunk):
            logits, mask, place = self._read_questions(cache, asked, longest)
            prefill_seconds = time.perf_counter() - started
            sequences = self._tensor([[*self._ids, *[self._pad] * (longest - len(ids)), *ids] for ids in asked])
            emit = None if on_text is None else _TextPieces(self.tokenizer, self._eos, on_text)
            choice = TokenChoice(
                self._criteria(sampling, sequences.shape[1]),
                _processors(sampling),
                do_sample=sampling.temperature > 0,
                generator=_generator(sampling, input_device(self.model)),
                pad_id=self._pad,
            )
            result = run(self.model, cache, PromptState(sequences, logits, place, mask), choice, on_token=emit)
        if emit is not None:
            emit.end()
        result.prefill_seconds = prefill_seconds
        return self._answers(result, cache, sequences.shape[1], sampling)

    def _prepare(self, tokens: int) -> None:
        """Decide the index and compile now what the first token would wait for."""
        spec = self._cache.index.decide(tokens)
        prepare(host_format(self.config.host_dtype, self.model.dtype), spec, tokens)

    def _read_questions(
        self, cache: RetrievalCache, asked: list[list[int]], longest: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Feed left-padded questions after the context; the padding lies between context and question."""
        padded = self._tensor([[self._pad] * (longest - len(ids)) + ids for ids in asked])
        real = [[False] * (longest - len(ids)) + [True] * len(ids) for ids in asked]
        valid = torch.tensor([[True] * self.num_tokens + row for row in real], device=input_device(self.model))
        place = positions(valid)
        mask = None if bool(valid.all()) else valid
        position_ids = place[:, self.num_tokens :]
        return forward(self.model, cache, padded, mask=mask, position_ids=position_ids), mask, place[:, -1]

    def _answers(
        self, result: Generated, cache: RetrievalCache, prompt_columns: int, sampling: Sampling
    ) -> list[Answer]:
        work = cache.stats()
        answers = []
        for row in result.sequences[:, prompt_columns:].tolist():
            ended = next((place for place, token in enumerate(row) if token in self._eos), None)
            tokens = row if ended is None else row[:ended]
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
            stopped = ended is not None or any(stop in text for stop in sampling.stop)
            for stop in sampling.stop:
                text = text.split(stop, 1)[0]
            stats = Stats(
                context_tokens=self.num_tokens,
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
                captured_mass=work.mass / work.mass_count if work.mass_count else None,
                indexes=cache.index_kinds(),
            )
            answers.append(Answer(text, tokens, "stop" if stopped else "length", stats))
        return answers

    def _criteria(self, sampling: Sampling, prompt_columns: int) -> StoppingCriteriaList:
        criteria = StoppingCriteriaList([MaxLengthCriteria(prompt_columns + sampling.max_new_tokens)])
        if self._eos:
            criteria.append(EosTokenCriteria(sorted(self._eos)))
        if sampling.stop:
            criteria.append(StopStringCriteria(self.tokenizer, list(sampling.stop)))
        return criteria

    def _tensor(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, device=input_device(self.model))

    @property
    def _eos(self) -> set[int]:
        """Ids that end an answer: the generation config's, else the tokenizer's."""
        configured = self.model.generation_config.eos_token_id if self.model.generation_config else None
        given = configured if configured is not None else self.tokenizer.eos_token_id
        return set(given) if isinstance(given, list | tuple) else {given} - {None}

    @property
    def _vocabulary(self) -> int:
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def _pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else next(iter(sorted(self._eos)), 0)


class _TextPieces:
    """Turns token ids into pieces of text, holding back bytes of a character that is not complete yet."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos: set[int], on_text: Callable[[str], None]) -> None:
        self._tokenizer, self._eos, self._on_text = tokenizer, eos, on_text
        self._tokens: list[int] = []
        self._sent = 0

    def __call__(self, new: list[int]) -> None:
        if new[0] in self._eos:
            return
        self._tokens.append(new[0])
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._send(text)

    def end(self) -> None:
        """Send what was held back."""
        self._send(str(self._tokenizer.decode(self._tokens, skip_special_tokens=True)))

    def _send(self, text: str) -> None:
        if len(text) > self._sent:
            self._on_text(text[self._sent :])
            self._sent = len(text)


class _progress:
    """A bar over the layers of a cache, shown only when it takes longer than two seconds."""

    def __init__(self, cache: RetrievalCache, what: str, show: bool) -> None:
        self._cache, self._what, self._show = cache, what, show

    def __enter__(self) -> None:
        if self._show:
            layers = len(self._cache.layers)
            self._bar = tqdm(total=layers, desc=self._what, unit="layer", delay=2.0, leave=False)
            self._cache.on_layer = self._bar.update

    def __exit__(self, *error: object) -> None:
        self._cache.on_layer = None
        if self._show:
            self._bar.close()


def _sampling(options: dict[str, Any]) -> Sampling:
    """Sampling from keywords; an unknown one is an error that lists the known ones."""
    known = list(Sampling.__dataclass_fields__)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"Unknown sampling option {', '.join(unknown)}; the options are {', '.join(known)}.")
    return Sampling(**options)


def _processors(sampling: Sampling) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if sampling.temperature > 0:
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k is not None:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
    return processors


def _generator(sampling: Sampling, device: torch.device) -> torch.Generator | None:
    return None if sampling.seed is None else torch.Generator(device).manual_seed(sampling.seed)


def _set_append(cache: RetrievalCache, append: Append) -> None:
    if append not in ("exact", "retrieval"):
        raise ConfigError(f'append must be "exact" or "retrieval", got {append!r}.')
    cache.config = cache.config.replace(exact_append=append == "exact")
    for layer in cache.layers:
        if isinstance(layer, RetrievalLayer):
            layer.config = cache.config
