"""LocalBackend: chat with a model in this process. Every token is prefilled once."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from retrieval_attn.answer import Answer
from retrieval_attn.cli.chat.backend import ChatBackend, Message
from retrieval_attn.context import Context
from retrieval_attn.errors import InputDataError
from retrieval_attn.llm import LLM
from retrieval_attn.memory.units import show_bytes
from retrieval_attn.prompt.encode import Escapes, stand_in
from retrieval_attn.prompt.render import cut_at, render
from retrieval_attn.sampling.sampling_params import Sampling
from retrieval_attn.store import ContextStore
from retrieval_attn.template import NO_TEMPLATE, PromptTemplate


@dataclass(frozen=True)
class LocalMark:
    """base: context of the document, never changed; None without one. reached: a context of base and the first turns,
    with the token ids of these turns; None if no turn was prefilled.
    """

    base: Context | None
    reached: tuple[Context, tuple[int, ...]] | None
    messages: tuple[Message, ...]


class ChatPrompt:
    """Render conversations with the tokenizer's chat template, or as "Question: ... Answer:" without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises InputDataError if the chat template cannot be rendered."""
        self._template = PromptTemplate.of(tokenizer)

    def asked(self, messages: Sequence[Message], *, behind: bool) -> list[int]:
        """Return ids up to the start of the answer to the last message.

        behind: the ids follow a context, which is the start of the first message. Otherwise they are the whole prompt.
        """
        escapes = self._template.encoder.escapes(messages)
        return self._ids(self._text(escapes.apply(messages), behind=behind), escapes, behind=behind)

    def kept(self, messages: Sequence[Message], *, behind: bool) -> list[int]:
        """Return ids up to the user's next question, the same for any question."""
        escapes, next_words = self._template.encoder.escapes(messages), stand_in(messages)
        said = [*escapes.apply(messages), {"role": "user", "content": next_words}]
        before, _ = cut_at(self._text(said, behind=behind), next_words)
        if not self._template.tokenizer.chat_template:
            before = before.removesuffix(self._template.middle)  # part of the next question
        return self._ids(before, escapes, behind=behind)

    def _text(self, messages: Sequence[Message], *, behind: bool) -> str:
        tokenizer = self._template.tokenizer
        if not behind and tokenizer.chat_template:
            return render(tokenizer, messages)
        text = self._template.question_text(messages)
        return text if behind else text.lstrip()

    def _ids(self, text: str, escapes: Escapes, *, behind: bool) -> list[int]:
        return (self._template.plain_ids if behind else self._template.start_ids)(text, escapes)


class LocalBackend(ChatBackend):
    """A ChatBackend over a model in this process. A turn prefills only the last answer and the new question."""

    def __init__(self, llm: LLM, name: str, sampling: Sampling, store: ContextStore) -> None:
        """name: the model's, for messages. Raises InputDataError if the chat template cannot be rendered."""
        super().__init__()
        self._llm, self._name, self._store = llm, name, store
        self._prompt = ChatPrompt(llm.tokenizer)
        self._sampling = replace(sampling, stop=(*sampling.stop, *PromptTemplate.of(llm.tokenizer).stops))
        self._base: Context | None = None
        self._reached: tuple[Context, tuple[int, ...]] | None = None
        self._last: Answer | None = None
        self._read_tokens, self._first_seconds = 0, 0.0

    def read(self, text: str | Sequence[int]) -> None:
        """Prefill the document, a text or its token ids; a progress bar appears after two seconds."""
        self._base, self._reached, self._messages = self._llm.read(text), None, []

    @property
    def about(self) -> str:
        read = 0 if self._base is None else self._base.num_tokens
        note = "" if self._llm.tokenizer.chat_template else f"{NO_TEMPLATE}\n"
        document = note + (f"document: {read:,} tokens; " if read else "")
        room = self._llm.max_context - read
        return (
            f"{self._name}, on {self._llm.device}\n{document}room for {room:,} tokens of conversation (--max-context)"
        )

    def answer(self, question: str) -> Generator[str, None, None]:
        messages = self._asked(question)
        ids = self._prompt.asked(messages, behind=self._base is not None)
        self._last, began = None, time.perf_counter()
        context = self._context(ids[:-1])
        pieces: list[str] = []
        with context.stream_with(ids[-1:], self._sampling) as stream:
            try:
                for piece in stream:
                    if not pieces:
                        self._first_seconds = time.perf_counter() - began
                    pieces.append(piece)
                    yield piece
            finally:
                self._last = stream.answer
                self._keep(messages, pieces)

    def fork(self, name: str) -> tuple[LocalMark, str]:
        """See `ChatBackend`. The KV cache is shared, not copied."""
        reached = None if self._reached is None else (self._reached[0].fork(), self._reached[1])
        return LocalMark(self._base, reached, tuple(self._messages)), f"remembered as {name!r} until the program ends"

    def go_back(self, mark: LocalMark) -> str:
        reached = None if mark.reached is None else (mark.reached[0].fork(), mark.reached[1])
        self._base, self._reached, self._messages = mark.base, reached, list(mark.messages)
        self._last = None
        return f"back at {self._tokens():,} tokens, {self._turns()}"

    def save(self, name: str) -> str:
        saved = self._whole().save(name, store=self._store)
        return (
            f"saved {saved.tokens:,} tokens as {name!r}, {show_bytes(saved.nbytes)} in {saved.seconds:.1f} s; "
            f"/load {name} here, or retrieval-attn ask {name} QUESTION"
        )

    def load(self, name: str) -> str:
        self._base, self._reached, self._messages = self._llm.open(name, store=self._store), None, []
        self._last = None
        return f"loaded {name!r}: {self._base.num_tokens:,} tokens, none prefilled again"

    def stats(self) -> str:
        told = f"{self._tokens():,} of {self._llm.max_context:,} tokens, {self._turns()}"
        if self._last is None:
            return told
        stats = self._last.stats
        tail = "" if stats.tail_share is None else f", {stats.tail_share:.1%} of attention estimated"
        return (
            f"{told}\nlast answer: {self._read_tokens:,} tokens prefilled, {stats.new_tokens} generated, first token "
            f"after {self._first_seconds:.2f} s, then {1000 * stats.seconds_per_token:.1f} ms per token{tail}\n"
            f"KV cache: {show_bytes(stats.host_bytes)} in host memory, {show_bytes(stats.device_bytes)} on the device"
        )

    def close(self) -> None:
        self._base = self._reached = None

    def _whole(self) -> Context:
        """Return a context of the whole conversation, up to the user's next question."""
        if self._messages:
            return self._context(self._prompt.kept(self._messages, behind=self._base is not None))
        if self._base is None:
            raise InputDataError("There is nothing to save: no document was read and no question was asked.")
        return self._base

    def _context(self, ids: list[int]) -> Context:
        """Return a context of the base and these ids; prefill the missing ones."""
        context, known = self._reached or (self._base and self._base.fork(), ())
        if tuple(ids[: len(known)]) != known:  # turns were dropped, or the template renders them differently now
            context, known = self._base and self._base.fork(), ()
        self._reached = None  # after an interruption or an error the next turn begins at the base
        more = ids[len(known) :]
        self._read_tokens = len(more)
        if context is None:
            context = self._llm.read(more)
        elif more:
            context.extend(more)
        self._reached = context, tuple(ids)
        return context

    def _tokens(self) -> int:
        held = self._base if self._reached is None else self._reached[0]
        return 0 if held is None else held.num_tokens
