"""Prompts: token ids of messages and texts, in the parts that requests share.

Requests share whole parts, so the end of a part must not depend on the text after it: a conversation is cut at the ends
of messages, and a long message before its last paragraph, which is likely the question about it. A follow-up turn then
shares all of the previous turn except the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from retrieval_attn.errors import ContextLengthError, InputDataError
from retrieval_attn.model.images import MAX_IMAGES, Image, ImageReader
from retrieval_attn.prompt.encode import Encoded, Escapes, stand_in
from retrieval_attn.prompt.render import cut_at, render, within_limit
from retrieval_attn.server.answer_parts import PROMPT_END_TOKENS, template_text
from retrieval_attn.server.tool_formats import format_of
from retrieval_attn.template import PromptTemplate, checked_ids, checked_text, continued_span

Turn = Mapping[str, Any]
"""A message: role, content, and the other fields that chat templates know. content: a text, or a list of parts
{"type": "text", "text": ...} and {"type": "image", "url": a data URL}.
"""
TEXT_ONLY = "This model reads text only; send messages without images."


@dataclass(frozen=True)
class Extras:
    """Arguments of the chat template besides messages.

    options: values of its variables. answering: end where the answer starts. specials: add the special tokens that the
    model expects at a start; None: unless there is a chat template, which writes them.
    """

    tools: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    answering: bool = True
    specials: bool | None = None


NO_EXTRAS = Extras()


class ChatRenderer:
    """See the module."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, images: ImageReader | None = None) -> None:
        """tokenizer: the model's, with a chat template. images: their reader; None: there are none."""
        self._tokenizer, self._images = tokenizer, images

    def render(self, messages: Sequence[Turn], extras: Extras) -> str:
        """Render messages and extras. Raises InputDataError for those that the template does not take."""
        if any("tool_calls" in message for message in messages):
            if self._arguments_are_text:
                messages = [_with_text_arguments(message) for message in messages]
            if (calls := format_of(template_text(self._tokenizer))) is not None:
                messages = [calls.turn(message) for message in messages]
        tools = list(extras.tools) or None
        text = render(self._tokenizer, messages, tools, answering=extras.answering, options=extras.options)
        return text if self._images is None else self._images.expand(text)

    def render_whole(self, messages: Sequence[Turn], extras: Extras) -> str:
        """Render messages and extras. Raises InputDataError also if the template leaves out any of them."""
        text, place, missing = self.render(messages, extras), 0, set()
        for number, message in enumerate(messages):
            for content in map(str.strip, _texts(message)):
                found = text.find(content, place)
                if found < 0 and content not in text:
                    missing.add(number)
                place = max(place, found)
        called = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        written = [message for number, message in enumerate(messages) if number not in missing]
        roles = " and ".join(sorted({messages[number]["role"] for number in missing}))
        if extras.tools:
            self._refuse_same(text, messages, replace(extras, tools=()), "tools")
        if called != list(messages):
            self._refuse_same(text, called, extras, "tool_calls")
        if missing:
            self._refuse_same(text, written, extras, f"messages of the {roles}")
        return text

    def _refuse_same(self, text: str, less: Sequence[Turn], extras: Extras, what: str) -> None:
        """Raise InputDataError if the text of a request is the text of less than the request."""
        try:
            without = self.render(less, extras)
        except InputDataError:
            return
        if without == text:
            raise InputDataError(
                f"The model's chat template does not write {what}, so that the model would not see them. Leave them "
                "out, or use a chat template that writes them."
            )

    @cached_property
    def _arguments_are_text(self) -> bool:
        """Whether the chat template takes the arguments of a tool call as JSON's text alone, as DeepSeek-R1's does."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        said: list[Turn] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "1"},
        ]
        try:
            render(self._tokenizer, said)
        except InputDataError:
            try:
                render(self._tokenizer, [_with_text_arguments(message) for message in said])
            except InputDataError:
                return False
            return True
        return False


def _with_text_arguments(message: Turn) -> Turn:
    """The message with the arguments of tool calls as JSON's text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        if isinstance(function, dict) and not isinstance(function.get("arguments", ""), str):
            call = {
                **call,
                "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)},
            }
        calls.append(call)
    return {**message, "tool_calls": calls}


Parts = tuple[tuple[int, ...], ...]

MIN_CHARACTERS = 256
"""Of a part, unless it is the last one: each is read by itself."""
EVERY_TURN = 128
"""Messages behind which there is a cut each; from then on, behind one in `SOME_TURNS`: a cut renders the template."""
SOME_TURNS = 32
LAST_TURNS = 8
"""Messages at the end of a long conversation behind which there is a cut each: the prompt before it ended there."""
PARAGRAPH = "\n\n"


class Prompts:
    """See the module. May be used by several threads.

    Messages, documents and questions become no control tokens; raw texts only with `parse_special`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, positions: int, *, reason: str = "",
        parse_special: bool = False, images: ImageReader | str = TEXT_ONLY,
    ) -> None:  # fmt: skip
        """vocabulary: ids that the model has embeddings for. positions: tokens of a prompt and its answer, at most.
        reason: why these are fewer than the model has, see `ContextLimit`.

        parse_special: encode words of special tokens in raw texts as these tokens. images: reader of the model's
        images, or the sentence with which images are refused.
        """
        self.tokenizer, self.positions, self._reason = tokenizer, positions, reason
        self._images = None if isinstance(images, str) else images
        self._no_images = images if isinstance(images, str) else ""
        self._template, self._renderer = PromptTemplate.of(tokenizer), ChatRenderer(tokenizer, self._images)
        self._vocabulary, self._parse_special = vocabulary, parse_special

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer to messages, besides a request's own; see `PromptTemplate`."""
        return self._template.stops

    @property
    def reads_images(self) -> bool:
        """Whether messages may have images."""
        return self._images is not None

    def images_of(self, messages: Sequence[Turn]) -> tuple[Image, ...]:
        """Read the images of messages, in order. Raises InputDataError for images that cannot be read, or too many."""
        parts = [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
        urls = [part["url"] for part in parts if part["type"] == "image"]
        if urls and self._images is None:
            raise InputDataError(self._no_images)
        if len(urls) > MAX_IMAGES:
            raise InputDataError(f"The messages have {len(urls)} images; a request may have {MAX_IMAGES}.")
        return tuple(self._images.of_url(url) for url in urls) if self._images is not None else ()

    def plain(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a prompt as the tokenizer knows them."""
        return list(ids) if self._images is None else self._images.plain(ids)

    def of_messages(self, messages: Sequence[Turn], extras: Extras = NO_EXTRAS, images: Sequence[Image] = ()) -> Parts:
        """A conversation, up to where the answer starts. Messages: role, content, and what the template knows.

        images: of `images_of`.

        Raises InputDataError for messages and extras that the template does not take or leaves out, ContextLengthError.
        """
        messages = [_without_urls(message) for message in messages]
        self._refuse_too_long(sum(len(text) for message in messages for text in _texts(message)))
        escapes = self._template.encoder.escapes(messages, extras.tools, extras.options)
        said = escapes.apply(list(messages))
        given = replace(extras, tools=escapes.apply(extras.tools), options=escapes.apply(extras.options))
        cuts: list[int] = []
        if not self.tokenizer.chat_template:
            _refuse_untemplated(messages, extras)
            _require_texts(messages)
            text = self._untemplated(said, cuts, answering=extras.answering)
        else:
            text = within_limit(lambda: self._conversation(said, given, cuts))
        return self._parts(text, cuts, escapes, adds=extras.specials, images=images)

    def of_question(self, messages: Sequence[Turn], extras: Extras = NO_EXTRAS) -> Parts:
        """Return the prompt after a saved context: questions and answers in turn.

        A system message is put before the first question.

        Raises as `of_messages`, and InputDataError for tools: the context was read before them.
        """
        self._require_short_texts(messages)
        escapes = self._template.encoder.escapes(messages, extras.options)
        said, options = escapes.apply(_asked(messages, extras)), escapes.apply(extras.options)
        template = self._template.with_options(options) if options else self._template
        while len(said) > 1 and said[0]["role"] == "system":
            first = said[1]["content"]
            said[:2] = [{**said[1], "content": f"{said[0]['content']}{PARAGRAPH}{first}"}]
        cuts: list[int] = []

        def text_of() -> str:
            text, closing = template.question_text(said), template.closing
            for count in _cut_turns(len(said)):
                if count % 2:
                    # templates strip what is said, where something follows it
                    asked = template.question_text(said[:count]).removesuffix(closing).rstrip()
                    cuts.extend([len(asked)] if text.startswith(asked) else [])
            return text

        return self._parts(within_limit(text_of), cuts, escapes, begins=False)

    def continued(self, parts: Parts, text: str) -> Parts:
        """Return a prompt with more text of the template, in which words of special tokens are these tokens."""
        *before, last = parts
        return (*before, (*last, *self._template.plain_ids(text, self._template.encoder.escapes())))

    def end_of(self, parts: Parts) -> str:
        """Return the text of a prompt's last `PROMPT_END_TOKENS` tokens, special tokens included."""
        ids: tuple[int, ...] = ()
        for part in reversed(parts):
            ids = (*part[-PROMPT_END_TOKENS:], *ids)
            if len(ids) >= PROMPT_END_TOKENS:
                break
        return str(self.tokenizer.decode(self.plain(ids[-PROMPT_END_TOKENS:]), skip_special_tokens=False))

    def thinking_options(self, effort: str | None, thinking: bool | None) -> dict[str, Any]:
        """Return variables of the chat template for a request's effort of reasoning, and whether the model thinks.

        effort: "none" for no thinking; None: not given. thinking: None: not given, by the effort then. Only variables
        that the chat template mentions are returned.
        """
        if thinking is None and effort is not None:
            thinking = effort != "none"
        given = {"reasoning_effort": effort, "enable_thinking": thinking, "thinking": thinking}
        template = template_text(self.tokenizer)
        return {
            name: value
            for name, value in given.items()
            if value is not None and re.search(rf"(?<![\w.'\"\]]){name}\b(?![\w'\"])", template)
        }

    def of_text(self, text: str, *, begins: bool = True) -> Parts:
        """A raw text, with the special tokens that the model expects at a start if it `begins`; cut before its last
        paragraph if it is long. Raises InputDataError for one without tokens, ContextLengthError.
        """
        self._refuse_too_long(len(text))
        cut = text.rstrip().rfind(PARAGRAPH)
        known = self.tokenizer.is_fast and cut >= MIN_CHARACTERS
        encoded = self._raw(text, begins=begins, offsets=known)
        ids, starts = encoded.ids, encoded.starts
        if begins:
            span = continued_span(self.tokenizer, ids)
            ids, starts = ids[span], None if starts is None else starts[span]
        if not ids:
            raise InputDataError("The prompt has no tokens; give a text that is not empty.")
        if starts is not None:
            place = int((starts >= cut).argmax())
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
        self._require_short_texts(messages)
        escapes, next_words = self._template.encoder.escapes(messages), stand_in(messages)
        said, ended = escapes.apply(list(messages)), messages[-1]["role"] == "user"
        if not self.tokenizer.chat_template:
            _refuse_untemplated(messages, NO_EXTRAS)
            # words of the user at the end are what will be asked about, not a question
            text = self._untemplated(said[:-1] if ended else said, [], answering=False)
            text += f"{PARAGRAPH if text else ''}{said[-1]['content']}" if ended else ""
            return tuple(self._template.start_ids(text, escapes))
        if ended:
            turns = [*said[:-1], {**said[-1], "content": said[-1]["content"] + next_words}]
        else:
            turns = [*said, {"role": "user", "content": next_words}]
        text = within_limit(lambda: self._renderer.render_whole(turns, Extras(answering=False)))
        return _some(self._template.plain_ids(cut_at(text, next_words)[0], escapes))

    def of_answered(self, messages: Sequence[Turn]) -> tuple[int, ...]:
        """Return questions and answers that extend a saved context, the last one an answer. Raises as `of_question`."""
        self._require_short_texts(messages)
        escapes, next_words = self._template.encoder.escapes(messages), stand_in(messages)
        said = escapes.apply(_asked(messages, NO_EXTRAS))
        text = self._template.question_text([*said, {"role": "user", "content": next_words}])
        before, _ = cut_at(text, next_words)
        if not self.tokenizer.chat_template:
            before = before.removesuffix(self._template.middle)  # the next question brings its own
        return _some(self._template.plain_ids(before, escapes))

    def of_more(self, text: str, *, raw: bool = False) -> tuple[int, ...]:
        """A text behind another. raw: see `Prompts`. Raises as `of_text`."""
        self._refuse_too_long(len(text))
        return _some(self._raw(text, begins=False).ids if raw else self._template.plain_ids(text))

    def _raw(self, text: str, *, begins: bool, offsets: bool = False) -> Encoded:
        """Ids of a text that a client made itself, and the first character of each if `offsets`."""
        encoder = self._template.encoder
        encode = encoder.tokenize if self._parse_special else encoder.encode
        return encode(checked_text(text), begins=begins, offsets=offsets)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def _require_short_texts(self, messages: Sequence[Turn]) -> None:
        """Raise InputDataError for messages with images, ContextLengthError for too long ones."""
        _require_texts(messages)
        self._refuse_too_long(sum(len(message["content"]) for message in messages))

    def _refuse_too_long(self, characters: int) -> None:
        """Before it is tokenized, which may take long."""
        least = characters // self._longest_token
        if least > self.positions:
            raise ContextLengthError(
                f"The prompt has {characters:,} characters, {least:,} tokens and more; the model has "
                f"{self.positions:,} positions. Shorten it.",
                limit=self.positions,
                tokens=least,
                reason=self._reason,
            )

    def _parts(
        self, text: str, cuts: Sequence[int], escapes: Escapes, *, begins: bool = True, adds: bool | None = None,
        images: Sequence[Image] = (),
    ) -> Parts:  # fmt: skip
        """`text` cut where the parts are long enough, or have images.

        begins: the first part is the start of a prompt. adds: see `Extras.specials`. images: of the text.
        """
        pieces, start = [], 0
        word = self._images.word if self._images is not None and images else None
        for cut in cuts:
            is_long = start + MIN_CHARACTERS <= cut or (word is not None and word in text[start:cut])
            if is_long and cut < len(text):
                pieces.append(text[start:cut])
                start = cut
        pieces.append(text[start:])
        template = self._template
        first = template.start_ids(pieces[0], escapes, adds) if begins else template.plain_ids(pieces[0], escapes)
        parts = (first, *(template.plain_ids(piece, escapes) for piece in pieces[1:]))
        found = tuple(tuple(part) for part in parts if part)
        if not found:
            raise InputDataError("The prompt has no tokens; give a message that is not empty.")
        return found if self._images is None else self._images.placed(found, images)

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

    def _conversation(self, messages: Sequence[Turn], extras: Extras, cuts: list[int]) -> str:
        """The messages in the chat template. cuts: gets where parts may end. Raises InputDataError."""
        text = self._renderer.render_whole(messages, extras)
        before, beginning = 0, replace(extras, answering=False)
        for count in _cut_turns(len(messages)):
            try:
                prefix = self._renderer.render(messages[:count], beginning)
            except InputDataError:  # the template takes the whole but not this beginning of it: there is no cut
                continue
            if text.startswith(prefix):
                said, word = _texts(messages[count - 1]), "" if self._images is None else self._images.word
                pictured = text.rfind(word, before, len(prefix)) if word else -1
                cuts += [pictured + len(word)] if pictured >= 0 else []
                cuts += [cut for cut in _paragraph(said[-1] if said else "", text, before) if cut > pictured]
                cuts.append(len(prefix))
                before = len(prefix)
        return text


def forked(parts: Parts) -> Parts:
    """The same prompt, all but its last token in parts that requests share: several answers then read it once."""
    *before, last = parts
    return (*before, last[:-1], last[-1:]) if len(last) > 1 else parts


def _cut_turns(messages: int) -> list[int]:
    counts = range(1, messages + 1)
    return [one for one in counts if one <= EVERY_TURN or one % SOME_TURNS == 0 or one >= messages - LAST_TURNS]


def _paragraph(content: str, text: str, start: int) -> list[int]:
    """Where the last paragraph of a message begins in the text, behind `start`; none where it cannot be told."""
    cut = content.rstrip().rfind(PARAGRAPH)
    if cut < MIN_CHARACTERS:
        return []
    head = content[:cut].lstrip()  # templates strip what is around
    found = text.find(head, start)
    return [] if found < 0 else [found + len(head)]


def _texts(message: Turn) -> list[str]:
    """Return the texts of a message."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _without_urls(message: Turn) -> Turn:
    """Return a message as chat templates take it: its images are marks."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": [part if part["type"] == "text" else {"type": "image"} for part in content]}


def _require_texts(messages: Sequence[Turn]) -> None:
    """Raise InputDataError for messages with images."""
    if not all(isinstance(message["content"], str) for message in messages):
        raise InputDataError(
            "Saved contexts, and models without a chat template, take no images; send images in messages, without "
            "context."
        )


def _some(ids: Sequence[int]) -> tuple[int, ...]:
    if not ids:
        raise InputDataError("The text has no tokens; give one that is not empty.")
    return tuple(ids)


def _asked(messages: Sequence[Turn], extras: Extras) -> list[dict[str, str]]:
    """Questions and answers about a saved context. Raises InputDataError for tools."""
    if extras.tools or any("tool_calls" in message for message in messages):
        raise InputDataError(
            "Questions about a saved context cannot have tools or tool_calls: the context was read before they are "
            "known. Leave them out, or send the text in messages."
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _refuse_untemplated(messages: Sequence[Turn], extras: Extras) -> None:
    """Raise InputDataError for all that only a chat template can write."""
    called = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    if extras.tools or extras.options or called:
        raise InputDataError(
            "The model has no chat template, so it takes no tools, tool_calls, messages of the tool or "
            "chat_template_kwargs. Leave them out, or describe the tools in a message."
        )
