"""Prompts: token ids of messages and texts, in the parts that requests share.

Requests share whole parts, so where a part ends must not depend on what comes behind it: a conversation is cut where a
message ends, and a long message before its last paragraph, which is likely the question about it. A follow-up turn then
finds all of the turn before but the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from retrieval_attn.errors import ContextLengthError, InputDataError
from retrieval_attn.template import PromptTemplate, checked_ids, checked_text

__all__ = ["Parts", "Prompts", "forked"]

Parts = tuple[tuple[int, ...], ...]
Turn = Mapping[str, Any]

MIN_CHARACTERS = 256
"""Of a part, unless it is the last one: each is read by itself."""
EVERY_TURN = 128
"""Messages behind which there is a cut each; from then on, behind one in `SOME_TURNS`: a cut renders the template."""
SOME_TURNS = 32
PARAGRAPH = "\n\n"
NEXT_WORDS = "NEXT-WORDS-GO-HERE"
"""Stands for what a user will say, to learn where that begins."""


class Prompts:
    """See the module. May be used by several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, positions: int) -> None:
        """vocabulary: ids that the model has embeddings for. positions: tokens of a prompt and its answer, at most."""
        self.tokenizer, self.positions = tokenizer, positions
        self._template = PromptTemplate.of(tokenizer)
        self._vocabulary = vocabulary

    def of_messages(self, messages: Sequence[Turn], tools: Sequence[Any] | None = None) -> Parts:
        """A conversation, up to where the answer starts. Messages: role, content, and what the template knows.

        Raises InputDataError for messages that the template does not take, ContextLengthError.
        """
        self._refuse_too_long(sum(len(message["content"]) for message in messages))
        if not self.tokenizer.chat_template:
            cuts: list[int] = []
            return self._parts(self._untemplated(messages, cuts, answering=True), cuts, begins=True)
        text = self._rendered(messages, tools, answering=True)
        cuts, before = [], 0
        for count in _cut_turns(len(messages)):
            prefix = self._rendered_beginning(messages[:count], tools)
            if prefix is None or not text.startswith(prefix):
                continue
            cuts += _paragraph(messages[count - 1]["content"], text, before)
            cuts.append(len(prefix))
            before = len(prefix)
        return self._parts(text, cuts, begins=False)

    def of_question(self, messages: Sequence[Turn]) -> Parts:
        """What continues a saved context: questions and answers in turn. A system's message joins the first question.

        Raises as `of_messages`.
        """
        self._refuse_too_long(sum(len(message["content"]) for message in messages))
        said = [{"role": message["role"], "content": message["content"]} for message in messages]
        while len(said) > 1 and said[0]["role"] == "system":
            first = said[1]["content"]
            said[:2] = [{**said[1], "content": f"{said[0]['content']}{PARAGRAPH}{first}"}]
        text, closing = self._template.question_text(said), self._template.closing
        cuts = []
        for count in _cut_turns(len(said)):
            if count % 2:
                # templates strip what is said, where something follows it
                asked = self._template.question_text(said[:count]).removesuffix(closing).rstrip()
                cuts += [len(asked)] if text.startswith(asked) else []
        return self._parts(text, cuts, begins=False)

    def of_text(self, text: str) -> Parts:
        """A text as it stands, with the special tokens that the model expects at a start; cut before its last paragraph
        if it is long. Raises InputDataError for one without tokens, ContextLengthError.
        """
        self._refuse_too_long(len(text))
        cut = text.rstrip().rfind(PARAGRAPH)
        known = self.tokenizer.is_fast and cut >= MIN_CHARACTERS
        encoded = self.tokenizer(checked_text(text), return_offsets_mapping=known)
        ids: list[int] = encoded["input_ids"]
        if ids and ids[-1] == self.tokenizer.eos_token_id != self.tokenizer.bos_token_id:
            ids = ids[:-1]  # some tokenizers close every text; this one goes on
        if not ids:
            raise InputDataError("The prompt has no tokens; give a text that is not empty.")
        if known:
            begins = (number for number, (start, _) in enumerate(encoded["offset_mapping"]) if start >= cut)
            place = next(begins, 0)
            if 0 < place < len(ids):
                return tuple(ids[:place]), tuple(ids[place:])
        return (tuple(ids),)

    def of_ids(self, ids: Sequence[int]) -> Parts:
        """Token ids as they are. Raises InputDataError for none, or one that the model has not."""
        if not ids:
            raise InputDataError("The prompt has no tokens; give at least one.")
        return (tuple(checked_ids(ids, self._vocabulary)),)

    def of_document(self, text: str) -> tuple[int, ...]:
        """A text that questions will follow, as `Context.read` takes it. Raises as `of_text`."""
        self._refuse_too_long(len(text))
        if not text.strip():
            raise InputDataError("A context needs some text; got nothing to read.")
        return tuple(self._template.context_ids(text))

    def of_conversation(self, messages: Sequence[Turn]) -> tuple[int, ...]:
        """A conversation that questions will follow: it ends where the user's next words begin, in the last message if
        that is the user's. Raises as `of_messages`.
        """
        self._refuse_too_long(sum(len(message["content"]) for message in messages))
        last = messages[-1]
        if not self.tokenizer.chat_template:
            ended = last["role"] == "user"  # words to ask about, not a question
            before = self._untemplated(messages[:-1] if ended else messages, [], answering=False)
            text = f"{before}{PARAGRAPH if before else ''}{last['content']}" if ended else before
            return tuple(self._template.context_ids(text))
        if last["role"] == "user":
            turns = [*messages[:-1], {**last, "content": last["content"] + NEXT_WORDS}]
        else:
            turns = [*messages, {"role": "user", "content": NEXT_WORDS}]
        return self._before_next_words(self._rendered(turns, None, answering=False))

    def of_answered(self, messages: Sequence[Turn]) -> tuple[int, ...]:
        """What continues a saved context, and is continued by questions: questions and answers in turn, the last one
        an answer. Raises as `of_messages`.
        """
        self._refuse_too_long(sum(len(message["content"]) for message in messages))
        said = [{"role": message["role"], "content": message["content"]} for message in messages]
        text = self._template.question_text([*said, {"role": "user", "content": NEXT_WORDS}])
        if not self.tokenizer.chat_template:
            text = text.replace(f"{self._template.middle}{NEXT_WORDS}", NEXT_WORDS)  # the next question brings its own
        return self._before_next_words(text)

    def _before_next_words(self, text: str) -> tuple[int, ...]:
        return self.of_more(text.partition(NEXT_WORDS)[0])

    def of_more(self, text: str) -> tuple[int, ...]:
        """A text behind another. Raises as `of_text`."""
        self._refuse_too_long(len(text))
        ids = tuple(self._template.plain_ids(text))
        if not ids:
            raise InputDataError("The text has no tokens; give one that is not empty.")
        return ids

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def _refuse_too_long(self, characters: int) -> None:
        """Before it is tokenized, which may take long."""
        least = characters // self._longest_token
        if least > self.positions:
            raise ContextLengthError(
                f"The prompt has {characters:,} characters, {least:,} tokens and more; the model has "
                f"{self.positions:,} positions. Shorten it."
            )

    def _parts(self, text: str, cuts: Sequence[int], *, begins: bool) -> Parts:
        """`text` cut where the parts are long enough. begins: the first part needs a start's special tokens."""
        pieces, start = [], 0
        for cut in cuts:
            if start + MIN_CHARACTERS <= cut < len(text):
                pieces.append(text[start:cut])
                start = cut
        pieces.append(text[start:])
        template = self._template
        first = template.context_ids(pieces[0]) if begins else template.plain_ids(pieces[0])
        parts = (first, *(template.plain_ids(piece) for piece in pieces[1:]))
        found = tuple(tuple(part) for part in parts if part)
        if not found:
            raise InputDataError("The prompt has no tokens; give a message that is not empty.")
        return found

    def _untemplated(self, messages: Sequence[Turn], cuts: list[int], *, answering: bool) -> str:
        """ "Question: ... Answer:" for what a user says, all else as it stands: for models without a chat template.

        cuts: gets where parts may end. answering: whether it ends where an answer starts.
        """
        text = ""
        template, asked = self._template, False
        for message in messages:
            asked = message["role"] == "user"
            if message["role"] == "assistant":
                text += f" {message['content']}"
            elif asked:
                said = f"{template.middle}{message['content']}"
                said, before = said if text else said.lstrip(), len(text)
                text += said
                cuts += _paragraph(message["content"], text, before)
                cuts.append(len(text))
                text += template.closing
            else:
                text += f"{PARAGRAPH}{message['content']}" if text else message["content"]
            if not asked:
                cuts.append(len(text))
        return text + template.closing if answering and not asked else text

    def _rendered(self, messages: Sequence[Turn], tools: Sequence[Any] | None, *, answering: bool) -> str:
        render: Callable[..., Any] = self.tokenizer.apply_chat_template
        try:
            return str(render(list(messages), tools=tools, tokenize=False, add_generation_prompt=answering))
        except Exception as error:  # whatever a template's author wrote
            raise InputDataError(
                f"The model's chat template does not take these {len(messages)} messages ({type(error).__name__}: "
                f"{error}); most want user and assistant in turn, after at most one system message."
            ) from error

    def _rendered_beginning(self, messages: Sequence[Turn], tools: Sequence[Any] | None) -> str | None:
        """None where the template takes the whole but not this beginning of it: there is no cut then."""
        try:
            return self._rendered(messages, tools, answering=False)
        except InputDataError:
            return None


def forked(parts: Parts) -> Parts:
    """The same prompt, all but its last token in parts that requests share: several answers then read it once."""
    *before, last = parts
    return (*before, last[:-1], last[-1:]) if len(last) > 1 else parts


def _cut_turns(messages: int) -> list[int]:
    return [count for count in range(1, messages) if count <= EVERY_TURN or count % SOME_TURNS == 0] + [messages]


def _paragraph(content: str, text: str, start: int) -> list[int]:
    """Where the last paragraph of a message begins in the text, behind `start`; none where it cannot be told."""
    cut = content.rstrip().rfind(PARAGRAPH)
    if cut < MIN_CHARACTERS:
        return []
    head = content[:cut].lstrip()  # templates strip what is around
    found = text.find(head, start)
    return [] if found < 0 else [found + len(head)]
