"""Where a context ends and a question begins in a model's prompt; texts and ids as they come from users."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from retrieval_attn.errors import InputDataError
from retrieval_attn.prompt.encode import Escapes, PromptEncoder, encoder_of, stand_in
from retrieval_attn.prompt.render import cut_at, render, shown

log = logging.getLogger(__name__)

Message = Mapping[str, str]
Question = str | Sequence[Message]
"""A question, or chat messages {"role": "user" or "assistant", "content": text} in turn, the last one from the user."""

FRAME_STOPS = ("\n\nQuestion:", "\nQuestion:", "\nAnswer:")
"""A base model goes on with these words of the frame where its answer ends."""
NO_TEMPLATE = (
    'the model has no chat template: it reads "Question: ... Answer:", and an answer ends before the next "Question:"; '
    "an instruction-tuned model answers better"
)
"""For users of a chat."""

_MESSAGES = (
    'give messages {"role": ..., "content": ...} whose roles are user, assistant, user, ..., beginning and ending with '
    "the user; the context stands at the start of the first of them"
)


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt is opening + context + middle + question + closing, each part tokenized on its own.

    Words of special tokens in contexts and questions are text; those of the chat template are control tokens.
    Chat models: one user turn "context, blank line, question", then the assistant's header, split from the
    tokenizer's own chat template. Models without one: "Question: ... Answer:" after the context.
    """

    tokenizer: PreTrainedTokenizerBase
    opening: str
    middle: str
    closing: str
    opening_has_specials: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> PromptTemplate:
        """The template of a tokenizer: its chat template if it has one. Raises InputDataError if that does not work.

        options: values of the chat template's variables.
        """
        if not tokenizer.chat_template:
            return cls(tokenizer, "", "\n\nQuestion: ", "\nAnswer:", False)
        context, question = stand_in(), stand_in()
        options = options or {}
        text = render(tokenizer, [{"role": "user", "content": f"{context}\n\n{question}"}], options=options)
        opening, behind = cut_at(text, context)
        middle, closing = cut_at(behind, question)
        return cls(tokenizer, opening, middle, closing, True, options)

    def with_options(self, options: Mapping[str, Any]) -> PromptTemplate:
        """Return the template with other values of the chat template's variables.

        Raises InputDataError if they change how contexts begin, or there is no chat template.
        """
        if not self.tokenizer.chat_template:
            raise InputDataError("The model has no chat template, so it takes no chat_template_kwargs; leave them out.")
        other = PromptTemplate.of(self.tokenizer, options)
        if other.opening != self.opening:
            raise InputDataError(
                f"The context was read behind {shown(self.opening)}, and with these chat_template_kwargs it would "
                f"stand behind {shown(other.opening)}. Leave them out, or send the text in messages."
            )
        return other

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer, for models without a chat template; with one, an end token does."""
        return () if self.tokenizer.chat_template else FRAME_STOPS

    @cached_property
    def encoder(self) -> PromptEncoder:
        """Token ids of this template's texts."""
        return encoder_of(self.tokenizer)

    def context_ids(self, text: str, before: str = "") -> list[int]:
        """Ids of opening and context, with exactly the special tokens the model expects at a start.

        before: precedes the text; words of special tokens in it are control tokens.
        """
        escapes = self.encoder.escapes(checked_text(text))
        return self.start_ids(self.opening + before + escapes.escape(text), escapes)

    def start_ids(self, text: str, escapes: Escapes | None = None, adds: bool | None = None) -> list[int]:
        """Ids of a text that begins a prompt. escapes: see `PromptEncoder.encode`.

        adds: whether special tokens are added; None: unless there is a chat template, which writes them itself.
        """
        add_specials = not self.opening_has_specials if adds is None else adds
        ids = self.encoder.encode(checked_text(text), escapes, begins=add_specials).ids
        return ids[continued_span(self.tokenizer, ids)] if add_specials else ids

    def question_ids(self, question: Question, raw: bool = False) -> list[int]:
        """Ids of everything from the end of the context to where the answer starts; none for a blank question.

        raw: `question`, a string, is all of that already, and words of special tokens in it are control tokens.
        Raises InputDataError for anything else than a `Question`.
        """
        if raw and not isinstance(question, str):
            raise InputDataError("raw=True needs the text that continues the context, got chat messages; drop raw.")
        if raw:
            text = checked_text(str(question))
            ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
            return ids
        said = question if isinstance(question, str) else _checked_messages(question)
        escapes = self.encoder.escapes(said)
        text = self.question_text(escapes.apply(said))
        return self.plain_ids(text, escapes) if text else []

    def question_text(self, question: Question) -> str:
        """The text from the end of the context to where the answer starts; "" for a blank question.

        Raises InputDataError for anything else than a `Question`.
        """
        if isinstance(question, str):
            return f"{self.middle}{question}{self.closing}" if question.strip() else ""
        return self._conversation(_checked_messages(question))

    def plain_ids(self, text: str, escapes: Escapes | None = None) -> list[int]:
        """Ids of a text that continues another: no special tokens are added. escapes: see `PromptEncoder.encode`."""
        return self.encoder.encode(checked_text(text), escapes).ids

    def _conversation(self, messages: list[dict[str, str]]) -> str:
        """The text of the messages after the context, up to where the answer starts."""
        first = messages[0]["content"]
        if len(messages) == 1:
            return f"{self.middle}{first}{self.closing}"
        if not self.opening_has_specials:
            texts = [message["content"] for message in messages]
            texts[::2] = [f"{self.middle}{text}{self.closing} " for text in texts[::2]]
            return "".join(texts)[:-1]
        context = stand_in(*(message["content"] for message in messages))
        turns = [{"role": "user", "content": f"{context}\n\n{first}"}, *messages[1:]]
        opening, rest = cut_at(render(self.tokenizer, turns, options=self.options), context)
        if opening != self.opening:
            raise InputDataError(
                "The tokenizer's chat template must begin every conversation alike, for the context is read before the "
                f"question is known; it began with {self.opening!r}, and with {opening!r} for {len(messages)} "
                "messages. Ask with a single string, or raw=True."
            )
        return rest


def continued_span(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> slice:
    """Return which of `ids`, a whole text with the tokenizer's special tokens, begin a prompt that goes on.

    Excluded are the end token that some tokenizers append, and the begin-of-sequence token that the tokenizer added to
    a text that has one: models are trained with a single one. The latter is logged once for each tokenizer.
    """
    added: list[int] = tokenizer("")["input_ids"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    closes = eos is not None and eos != bos and list(ids[-1:]) == added[-1:] == [eos]
    doubled = bos is not None and list(ids[:2]) == [bos, bos] and added[:1] == [bos]
    if doubled and tokenizer not in _doubled:
        _doubled.add(tokenizer)
        log.warning(
            "a text begins with %r, which the tokenizer adds to every text: one is kept. Leave it out of the text.",
            tokenizer.bos_token,
        )
    return slice(int(doubled), len(ids) - closes)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text that is a whole prompt. Raises InputDataError for a text without tokens."""
    ids: list[int] = tokenizer(checked_text(text), verbose=False)["input_ids"]
    ids = ids[continued_span(tokenizer, ids)]
    if not ids:
        raise InputDataError(f"The prompt {text!r} has no tokens; give at least one.")
    return ids


_doubled: weakref.WeakSet[PreTrainedTokenizerBase] = weakref.WeakSet()


def checked_text(text: str) -> str:
    """`text`, if it is a string that a tokenizer can read. Raises InputDataError."""
    if not isinstance(text, str):
        raise InputDataError(f"A text must be a string, got {type(text).__name__}; decode bytes first.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputDataError(
            f"A text must be valid Unicode, got the lone surrogate {text[error.start]!r} at position {error.start}; "
            'read files with encoding="utf-8" and errors="replace".'
        ) from error
    return text


def checked_ids(ids: Sequence[int], vocabulary: int) -> list[int]:
    """Token ids as a list, each an integer in [0, vocabulary). Raises InputDataError."""
    if isinstance(ids, Mapping) and "input_ids" in ids:
        raise InputDataError(
            f"Token ids must be a list of integers, got a {type(ids).__name__}, as a tokenizer returns it; pass its "
            '["input_ids"], for one text and without a batch dimension.'
        )
    if isinstance(ids, str | bytes | bytearray | Mapping):
        raise InputDataError(f"Token ids must be a list of integers, got {type(ids).__name__}; decode bytes.")
    try:
        numbers = [operator.index(token) for token in ids]
    except TypeError as error:
        raise InputDataError(
            f"Token ids must be a list of integers, got {shown(ids)} ({error}); tokenize text with the model's own "
            "tokenizer, or give it as a string."
        ) from error
    if numbers and (min(numbers) < 0 or max(numbers) >= vocabulary):
        raise InputDataError(
            f"Token ids must be in [0, {vocabulary}) for this model, got {min(numbers)} to {max(numbers)}; tokenize "
            "with the model's own tokenizer."
        )
    return numbers


def _checked_messages(question: object) -> list[dict[str, str]]:
    if not isinstance(question, Sequence) or isinstance(question, bytes | bytearray):
        raise InputDataError(
            f"A question must be a string or a list of chat messages, got {shown(question)}; ask a non-empty question."
        )
    if not question:
        raise InputDataError(f"A list of chat messages must not be empty; {_MESSAGES}.")
    messages = []
    for turn, message in enumerate(question):
        role = ("user", "assistant")[turn % 2]
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or message.get("role") != role:
            raise InputDataError(f"Message {turn} must be from the {role}, got {shown(message)}; {_MESSAGES}.")
        if not isinstance(content, str):
            raise InputDataError(f"Message {turn} must have a string as content, got {shown(content)}.")
        messages.append({"role": role, "content": content})
    if len(messages) % 2 == 0:
        raise InputDataError(f"The last message must be from the user, got one from the assistant; {_MESSAGES}.")
    return messages
