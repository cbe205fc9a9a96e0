"""ChatRenderer: conversations in the model's chat template, which writes all of them or is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from retrieval_attn.errors import InputDataError
from retrieval_attn.prompt.render import render

__all__ = ["NO_EXTRAS", "ChatRenderer", "Extras", "Turn"]

Turn = Mapping[str, Any]
"""A message: role, content, and what chat templates know beside them."""


@dataclass(frozen=True)
class Extras:
    """What a request gives the chat template beside messages.

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

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """tokenizer: the model's, with a chat template."""
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Turn], extras: Extras) -> str:
        """Render messages and extras. Raises InputDataError for those that the template does not take."""
        if any("tool_calls" in message for message in messages) and self._arguments_are_text:
            messages = [_with_text_arguments(message) for message in messages]
        tools = list(extras.tools) or None
        return render(self._tokenizer, messages, tools, answering=extras.answering, options=extras.options)

    def render_whole(self, messages: Sequence[Turn], extras: Extras) -> str:
        """Render messages and extras. Raises InputDataError also if the template leaves out any of them."""
        text, place, missing = self.render(messages, extras), 0, set()
        for number, message in enumerate(messages):
            content = message["content"].strip()
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
