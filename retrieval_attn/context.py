"""Context: a long text that is read and indexed once and asked many times."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from retrieval_attn.answer import Answer, Stream
from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache, Rollback, require_same_weights
from retrieval_attn.attention.reread import goes_on
from retrieval_attn.attention.sequence import attended_columns
from retrieval_attn.config import Config, QuestionAttention, require_question_attention, resolve
from retrieval_attn.errors import CacheMismatchError, ConfigError, InputDataError, UnsupportedModelError
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.image_embedding import PromptImages
from retrieval_attn.model.images import placed_images
from retrieval_attn.model.loading import load_image_encoder
from retrieval_attn.runner.exact_steps import attends_to_all, is_exact
from retrieval_attn.runner.forget import forget_tokens
from retrieval_attn.runner.full_attention import ExpectedTokens, answer_with_full_attention, attach_full_kv
from retrieval_attn.runner.prefill import abandon
from retrieval_attn.runner.switch import enabled_config
from retrieval_attn.sampling.sampling_params import Sampling
from retrieval_attn.saving.save import Saved, SavedLineage, described, open_saved, template_digest
from retrieval_attn.saving.save_reading import ReadingSave
from retrieval_attn.store import ContextStore
from retrieval_attn.template import PromptTemplate, Question, checked_ids

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate["Context", _Given], _Result]


def _alone(method: _Method[_Given, _Result]) -> _Method[_Given, _Result]:
    """Run a method of a Context after those of other threads that change it."""

    @functools.wraps(method)
    def waiting(context: Context, *args: _Given.args, **options: _Given.kwargs) -> _Result:
        with context._changing:
            return method(context, *args, **options)

    return waiting


class Context:
    """One document in a model's memory: read once, then asked, extended and forked.

    The keys and values live on the host; forks and questions share them. A question never changes the context: it
    continues a fork. Reading or extending that fails leaves it as it was; while one thread reads or extends, questions,
    forks and saves of other threads wait. kept: what it is saved as, or opened from.

    question, wherever one is taken: a string, or a list of chat messages {"role": "user" or "assistant", "content":
    text} in turn, the last one from the user; the context stands at the start of the first message. A string, and the
    messages, are put into the tokenizer's chat template, or for models without one into "Question: ... Answer:".
    Words of special tokens in texts and questions are encoded as text; for control tokens give token ids, or ask with
    raw=True.
    sampling: a `Sampling`, or its fields as keywords (max_new_tokens, temperature, ...), not both.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: Config | None = None, **overrides: Any
    ) -> None:
        """An empty context of `model`. Raises UnsupportedModelError, ConfigError or InputDataError (chat template)."""
        self.model: PreTrainedModel = unwrapped(model)
        self.tokenizer = tokenizer
        self.config = resolve(config if config is not None else enabled_config(model), overrides)
        self.template = PromptTemplate.of(tokenizer)
        self.read_seconds = 0.0
        self._loop = AnswerLoop(self.model, tokenizer)
        self._cache = RetrievalCache(self.model, self.config)
        self._changing = threading.RLock()
        self.kept = SavedLineage()
        self._whole = True  # False while text is appended, and after an interruption that could not be undone

    @property
    def _ids(self) -> Sequence[int]:
        """Token ids of the context, in the cache's one sequence."""
        rows = self._cache.batch.sequences
        return rows[0].token_ids if rows else ()

    def __repr__(self) -> str:
        """Return the number of tokens and the model's name."""
        return f"<Context of {self.num_tokens:,} tokens, model {self.model.config.name_or_path!r}>"

    @property
    def num_tokens(self) -> int:
        """Tokens that are attended to, template and begin-of-sequence token included; not those that are forgotten."""
        return attended_columns(self._cache.batch)

    @property
    def cache(self) -> RetrievalCache:
        """The cache that holds this context (fork it before generating with it)."""
        return self._cache

    def index_notes(self) -> list[str]:
        """Why each head has the index it has, one line per head, where something chose it."""
        return self._cache.index_notes()

    @_alone
    def read(
        self,
        text: str | Sequence[int],
        *,
        images: Sequence[bytes | str | Path] = (),
        progress: bool = True,
        save: str | None = None,
        store: ContextStore | str | Path | None = None,
        wait: bool = True,
    ) -> Context:
        """Prefill and index `text` (or token ids, taken as they are), layer by layer. Returns self, indexes ready.

        A string gets the template's opening: the begin-of-sequence token and, for chat models, the start of the
        user's turn. A bar shows the layers when reading takes longer than two seconds.
        images: files, or their bytes, of images that stand before the text; needs the extra `images`. Such a context
        is not saved.
        save, store: keep the context under this name, see `save`; each layer is written while later ones are read.
        wait=False: a thread writes what is left when all is read; `kept.saving.wait()` waits for it.
        Raises InputDataError for an empty text or a context that was read already, ContextLengthError. StoreError, if
        saving failed: the context was read all the same.
        """
        self._require_empty()
        if images:
            return self._read_images(text, images, progress, save)
        ids = self._checked(self.template.context_ids(text) if isinstance(text, str) else text)
        saving = None
        if save is not None:
            saving = ReadingSave(as_store(store), save, self.model, self.tokenizer, self._cache, ids)
        with contextlib.nullcontext() if saving is None else saving.while_reading():
            self._read(ids, progress)
        if saving is not None:
            saving.finish(self.kept, self._described(), wait=wait, progress=progress)
        return self

    def _read(self, ids: list[int], progress: bool) -> None:
        """Read the first tokens; after an error the context is empty."""
        self._whole = False
        try:
            self._append(ids, progress)
        except BaseException:  # Ctrl-C too
            abandon(self._cache)
            self._cache, self._whole = RetrievalCache(self.model, self.config), True
            raise
        self._whole = True

    def _read_images(
        self, text: str | Sequence[int], images: Sequence[bytes | str | Path], progress: bool, save: str | None
    ) -> Context:
        if not isinstance(text, str) or save is not None:
            raise InputDataError("A context with images needs a text that is a string, and cannot be saved.")
        encoder = load_image_encoder(self.model, self.tokenizer)
        read = [encoder.reader.of_file(one if isinstance(one, bytes) else Path(one).read_bytes()) for one in images]
        (ids,) = encoder.reader.placed([self.template.context_ids(text, encoder.reader.text * len(read))], read)
        self._cache.batch.images = prompt = PromptImages(encoder, placed_images(ids, read))
        self._read(list(ids), progress)
        self._cache.batch.images = prompt.without_data()
        return self

    @_alone
    def open(
        self, name: str, *, store: ContextStore | str | Path | None = None, progress: bool = True, **overrides: Any
    ) -> Context:
        """Take up a saved context in place of reading a text; see `LLM.open`. Returns self."""
        self._require_empty()
        template, place = self._described()["template"], (as_store(store), name, self.model, self.tokenizer)
        self._cache, self.kept = open_saved(*place, self.config, overrides, progress, template)
        self.config = self._cache.config
        return self

    @_alone
    def extend(self, text: str | Sequence[int], *, progress: bool = True) -> Context:
        """Append more text or token ids; they attend to the whole context as config.question_attention says."""
        self._require_whole()
        if not self._ids:
            return self.read(text, progress=progress)
        ids = self._checked(self.template.plain_ids(text) if isinstance(text, str) else text)
        before, rewritten, self._whole = Rollback(self._cache), self._cache.batch.rewritten, False
        try:
            self._append(ids, progress)
        except BaseException:  # Ctrl-C too
            self._whole = before.undo()
            raise
        self._whole = True
        self.kept = self.kept if self._cache.batch.rewritten == rewritten else self.kept.emptied()  # read again
        return self

    @_alone
    def forget(self, start: int, stop: int) -> Context:
        """From now on nothing attends to tokens [start, stop), which make room for as many more. Returns self.

        Tokens are numbered as they were read, also after others were forgotten. The first `start` stay as sinks: at
        most config.sink, or as many as an earlier call left. stop: up to where the window of recent tokens begins, at
        least an earlier call's. What came after `stop` has seen what is forgotten, and keeps what it made of it. Forks
        keep their own tokens. Raises InputDataError for an empty context, ConfigError for other numbers,
        UnsupportedModelError for layers with a state, for images and where positions are not those of a fixed rotary
        embedding.
        """
        self._require_whole()
        if self._cache.batch.images is not None:
            raise UnsupportedModelError("A context with images cannot forget: its positions do not count tokens.")
        if not self._ids:
            raise InputDataError("The context is empty: there is nothing to forget; call read(text) first.")
        forget_tokens(self._cache, self.model, start, stop)
        return self

    @_alone
    def save(self, name: str, *, store: ContextStore | str | Path | None = None, wait: bool = True) -> Saved:
        """Keep the context on disk under `name`, in place of what had that name: `LLM.open` brings it back.

        Keys, values, indexes, codes and clusters are written as they are; of a context that was saved or opened
        before, only what came since. store: a folder; None: the environment variable RETRIEVAL_ATTN_STORE, or the
        user's data folder. wait=False: a thread writes it, while the context is asked and extended; `Saved.wait` waits.
        A save that fails, or a process that ends in the middle, leaves what had the name before.
        Raises InputDataError (an empty context), StoreError (also for a name of other signs than A-Z a-z 0-9 . _ -).
        """
        self._require_whole()
        if not self._ids:
            raise InputDataError("The context is empty; call read(text) before save().")
        return self.kept.save(as_store(store), name, self.model, self.tokenizer, self._cache, self._described(), wait)

    @_alone
    def fork(self) -> Context:
        """An independent copy that shares the host's keys, values and indexes."""
        self._require_whole()
        other = object.__new__(Context)
        other.__dict__.update(self.__dict__)
        other._cache, other.kept, other._changing = self._cache.fork(), self.kept.fork(), threading.RLock()
        return other

    def __reduce__(self) -> NoReturn:
        raise InputDataError(
            "A Context cannot be copied or pickled: a copy would change with the original. Call context.fork() for an "
            "independent one, which shares the keys."
        )

    def ask(
        self,
        question: Question,
        sampling: Sampling | None = None,
        *,
        raw: bool = False,
        question_attention: QuestionAttention | None = None,
        on_text: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Answer:
        """Answer one question about the context, which stays as it was.

        raw: take `question` as the exact continuation of the context, words of special tokens as control tokens.
        question_attention: how the question's own tokens attend to the context, "exact" or "retrieval" (default: that
        of the config). on_text: called with each new piece of text. With full_attention="exact" the answer is the one
        of full attention, whatever fits the GPU (`Config.full_attention`).
        Raises InputDataError, ConfigError.
        """
        asked = [self.template.question_ids(question, raw)]
        return self._answer(asked, question_attention, Sampling.of(sampling, options), on_text)[0]

    def ask_many(
        self,
        questions: Sequence[Question],
        sampling: Sampling | None = None,
        *,
        raw: bool = False,
        question_attention: QuestionAttention | None = None,
        **options: Any,
    ) -> list[Answer]:
        """Answer several questions in one batch. The context's keys are held, and scanned, once for all."""
        if isinstance(questions, str | bytes) or not isinstance(questions, Sequence) or not questions:
            raise InputDataError(f"ask_many needs a non-empty list of questions, got {questions!r}; use ask() for one.")
        asked = [self.template.question_ids(question, raw) for question in questions]
        return self._answer(asked, question_attention, Sampling.of(sampling, options))

    def continue_with(
        self,
        ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        question_attention: QuestionAttention | None = None,
        **options: Any,
    ) -> Answer:
        """Generate after `ids`, taken as they are: they continue the context, which stays as it was.

        question_attention: see `ask`.
        """
        return self._answer([self._checked(ids)], question_attention, Sampling.of(sampling, options))[0]

    def stream(
        self,
        question: Question,
        sampling: Sampling | None = None,
        *,
        raw: bool = False,
        question_attention: QuestionAttention | None = None,
        **options: Any,
    ) -> Stream:
        """Like `ask`, as an iterator over pieces of text; its `answer` is the whole, once the text has ended.

        It can be left at any time: generating then stops. Raises InputDataError, ConfigError.
        """
        asked, chosen = self.template.question_ids(question, raw), Sampling.of(sampling, options)
        return self.stream_with(asked, chosen, question_attention=question_attention)

    def stream_with(
        self,
        ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        question_attention: QuestionAttention | None = None,
        **options: Any,
    ) -> Stream:
        """Stream the continuation of token ids: `continue_with` as an iterator over pieces of text.

        Raises InputDataError, ConfigError.
        """
        asked, chosen = [checked_ids(ids, self._loop.vocabulary)], Sampling.of(sampling, options)
        with self._changing:
            self._require_answerable(asked, question_attention, chosen)

        def work(on_text: Callable[[str], None], cancelled: threading.Event) -> Answer:
            return self._answer(asked, question_attention, chosen, on_text, cancelled)[0]

        return Stream(work)

    def _append(self, ids: list[int], progress: bool) -> None:
        self._cache.require_room(len(ids))
        batch = self._loop.batch([ids], before=self._ids)
        started = time.perf_counter()
        self._loop.read_whole(self._cache, batch, progress)
        self.read_seconds += time.perf_counter() - started
        self._cache.batch.note_ids(batch.ids)

    def _require_whole(self) -> None:
        self.kept.require_whole()
        if not self._whole:
            raise CacheMismatchError(
                "Text was being added to this context when that was interrupted, and it could not be undone. Read "
                "the text again in a new Context."
            )
        require_same_weights(self._cache)

    def _answer(
        self,
        asked: list[list[int]],
        question_attention: QuestionAttention | None,
        sampling: Sampling,
        on_text: Callable[[str], None] | None = None,
        cancelled: threading.Event | None = None,
    ) -> list[Answer]:
        """Answer questions, given as token ids, in one batch; one by one if their rotary factors may differ."""
        expected = ExpectedTokens(max(map(len, asked), default=0) + sampling.max_new_tokens, len(asked))
        with self._changing:
            self._require_answerable(asked, question_attention, sampling)
            tokens, batch = len(self._ids), self._loop.batch(asked, before=self._ids)
            total = tokens + expected.tokens
            exact = attends_to_all(self._cache, sampling.full_attention, total)
            one_by_one = len(asked) > 1 and (exact or _may_change(self._cache, total))
            prefills_again = not goes_on(self._cache, total)  # no cached key is used then
            retrieves, mode = one_by_one or prefills_again, sampling.full_attention or self.config.full_attention
            fork = None if retrieves else attach_full_kv(self.model, self._cache, expected, mode)
            plain = self._cache.fork() if fork is None and not one_by_one else None
        if one_by_one:
            return [self._answer([one], question_attention, sampling, on_text, cancelled)[0] for one in asked]

        def answers(cache: RetrievalCache, emit: Callable[[str], None] | None) -> list[Answer]:
            cache.batch.attends_to_all = exact and cache.batch.paged_prefix is None
            cache.batch.question_attention = "exact" if exact else question_attention
            if len(asked) > 1:
                cache.batch_repeat_interleave(len(asked))
                cache.batch.rows_alone = True
            return self._loop.answer(cache, batch, sampling, emit, cancelled)

        try:
            found = None if fork is None else answer_with_full_attention(self.model, fork, answers, on_text)
            if found is not None:
                return found
            fork = None  # frees its pages
            return answers(self._fork_at(tokens) if plain is None else plain, on_text)
        except UnsupportedModelError:
            self.kept.wait()  # damaged keys give NaN too: StoreDamagedError is raised for them
            raise

    def _fork_at(self, tokens: int) -> RetrievalCache:
        """Fork the cache. Raises CacheMismatchError unless it still holds `tokens` tokens."""
        with self._changing:
            self._require_whole()
            if len(self._ids) != tokens:
                raise CacheMismatchError(
                    f"The context had {tokens:,} tokens when it was asked and has {len(self._ids):,} now: ask again, "
                    "and extend a fork while questions run."
                )
            return self._cache.fork()

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """Return token ids as a list. Raises InputDataError for none, and for ids outside the vocabulary."""
        checked = checked_ids(ids, self._loop.vocabulary)
        if not checked:
            raise InputDataError("The text has no tokens; give a non-empty string or list of token ids.")
        return checked

    def _described(self) -> dict[str, Any]:
        """Return the facts that are saved with the context's name."""
        digest = template_digest(self.template.opening, self.template.middle, self.template.closing)
        return described(digest, self.num_tokens, self.read_seconds, self.model)

    def _require_answerable(
        self, asked: list[list[int]], question_attention: QuestionAttention | None, sampling: Sampling
    ) -> None:
        """Raise if questions cannot be answered; open the files of a saved context otherwise."""
        self._require_whole()
        if not self._ids:
            raise InputDataError("The context is empty; call read(text) first.")
        if not all(asked):
            raise InputDataError("A question has no tokens; ask a non-empty question.")
        if question_attention is not None:
            require_question_attention(question_attention)
            if question_attention == "retrieval" and is_exact(self._cache, sampling.full_attention):
                raise ConfigError('full_attention="exact" has questions attend to all keys; drop question_attention.')
        self._cache.require_room(max(map(len, asked)) + sampling.max_new_tokens)
        self.kept.hold()

    def _require_empty(self) -> None:
        """Raise InputDataError for a context with tokens."""
        self._require_whole()
        if self._ids:
            raise InputDataError(
                f"This context holds {len(self._ids)} tokens already; use extend() to append, or a new Context."
            )


def _may_change(cache: RetrievalCache, tokens: int) -> bool:
    """Whether rows of a batch of up to `tokens` tokens each, which share rotary factors, may need different ones."""
    return cache.rope is not None and cache.rope.may_change(tokens)


def as_store(given: ContextStore | str | Path | None) -> ContextStore:
    """The store in a folder, or as it is given."""
    return given if isinstance(given, ContextStore) else ContextStore(given)
