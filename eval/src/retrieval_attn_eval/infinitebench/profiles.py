"""Prompt profiles: the words around a context, the chat messages, and the room for the answer, project by project.

official-chat and official-completion are the benchmark's own (OpenBMB/InfiniteBench, src/prompt.py, its GPT-4 and its
YaRN-Mistral prompts), minference is microsoft/MInference's (the completion prompt as one system message), infllm is
thunlp/InfLLM's, kvpress is NVIDIA/kvpress's.  Numbers of different profiles are not comparable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn_eval.infinitebench import templates
from retrieval_attn_eval.infinitebench.catalogue import TASKS
from retrieval_attn_eval.infinitebench.record import Record
from retrieval_attn_eval.prompts import PromptFormat

__all__ = ["PROFILES", "Pieces", "Profile", "get_profile"]

_MARK = "CONTEXTGOESHERE"
_CALL = re.compile(r"func_[0-9]+\(-?[0-9]+\)")
_TARGET = re.compile(r"The .+ of")
_KEY = re.compile(r'"[^"]+"')
_VALUE_CUE = "The value associated with the specified key is:"
_LARGEST_HINT = "You should answer with only one number, no other words. The largest number of the list is:"


@dataclass(frozen=True)
class Pieces:
    """What stands around a record's context: prompt = before + context + after + question + answer_prefix.

    after belongs to what is read before the question comes.
    """

    before: str
    after: str
    question: str
    answer_prefix: str


@dataclass(frozen=True)
class Profile:
    """One project's way to ask.

    messages: role of the message that holds the prompt, after an optional system text; None: never a chat template.
    max_new_tokens: per task.  seam: what stands between question and answer prefix without a chat template.
    """

    name: str
    texts: Mapping[str, str | tuple[str, str, str]]
    max_new_tokens: Mapping[str, int]
    role: str | None
    system: str | None = None
    seam: str = ""

    def pieces(self, record: Record) -> Pieces:
        """The words around a record's context.  Raises InputDataError if a question lacks what its task asks for."""
        text = self.texts[record.task]
        holes = _holes(record)
        if isinstance(text, tuple):
            context, question, prefix = text
            before, after = context.split("{context}")
            return Pieces(before.format_map(holes), after.format_map(holes), question.format_map(holes), prefix)
        before, question = text.split("{context}")
        return Pieces(before.format_map(holes), "", question.format_map(holes), "")

    def frame(self, tokenizer: Any, chat: str = "auto") -> PromptFormat:
        """Head and tail of this profile's prompts.  chat: "auto" uses the tokenizer's chat template, "never" does not.

        Raises ConfigError if the template refuses this profile's messages or changes the prompt in them.
        """
        plain = PromptFormat.of(tokenizer, "never")
        if chat == "never" or self.role is None or not getattr(tokenizer, "chat_template", None):
            return PromptFormat(plain.head, self.seam, False, tokenizer)
        turns = [{"role": "system", "content": self.system}] if self.system else []
        turns.append({"role": self.role, "content": _MARK})
        try:
            text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except Exception as refused:  # templates raise errors of their template language
            roles = " and ".join(dict.fromkeys(turn["role"] for turn in turns))
            raise ConfigError(
                f"--profile {self.name} needs a chat template with {roles} messages, this tokenizer's refuses them"
                f" ({refused}); use another profile or --chat-template never"
            ) from None
        if text.count(_MARK) != 1:
            raise ConfigError(
                f"--profile {self.name} needs a chat template that shows a {self.role} message once, this one shows it"
                f" {text.count(_MARK)} times; use another profile or --chat-template never"
            )
        before, tail = text.split(_MARK)
        head = tuple(tokenizer(before, add_special_tokens=False, verbose=False)["input_ids"])
        if plain.head and head[: len(plain.head)] != plain.head:  # this template leaves BOS to the tokenizer
            head = plain.head + head
        return PromptFormat(head, tail, True, tokenizer)


class _Holes(dict[str, str]):
    def __init__(self, record: Record) -> None:
        super().__init__(
            input=record.question, question=record.question, **dict(zip("ABCD", record.options, strict=False))
        )
        self._record = record

    def __missing__(self, name: str) -> str:
        raise InputDataError(
            f"{self._record.where}: {self._record.task} needs {_NEEDS.get(name, name)} in its question, found"
            f" {self._record.question[:80]!r}; correct the file"
        )


_NEEDS = {
    "func_call": "a call such as func_12(-3)",
    "func": "a call such as func_12(-3)",
    "target": '"The ... number of"',
    "key": "a quoted key",
}


def _holes(record: Record) -> _Holes:
    holes = _Holes(record)
    if call := _CALL.search(record.question):
        holes.update(func_call=call.group(), func=call.group().split("(")[0])
    if target := _TARGET.search(record.question):
        holes["target"] = target.group().lower().removesuffix(" of")
    if key := _KEY.search(record.question):
        holes["key"] = key.group()
    holes["key_only"] = record.question.replace(_VALUE_CUE, "")
    holes["hint"] = record.question.replace(_LARGEST_HINT, "")
    return holes


def _sizes(*values: int) -> dict[str, int]:
    """Room for answers, in the order of TASKS."""
    return dict(zip(TASKS, values, strict=True))


_OFFICIAL = _sizes(6, 12, 50, 1200, 40, 40, 40, 40, 5, 5, 30000, 3)
# the published chat runs set no limit; two of these prompts ask the model to think before it answers
_CHATTY = _sizes(32, 32, 100, 1200, 40, 40, 40, 40, 2048, 1024, 30000, 32)
_SYSTEM = "You are a helpful assistant"

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "minference",
            templates.COMPLETION,
            {**_OFFICIAL, "passkey": 15, "number_string": 20, "kv_retrieval": 80},
            "system",
        ),
        Profile("official-completion", templates.COMPLETION, _OFFICIAL, None),
        Profile("official-chat", templates.CHAT, _CHATTY, "user", _SYSTEM),
        Profile("infllm", templates.INFLLM, _sizes(32, 32, 100, 1536, 32, 32, 32, 32, 32, 32, 64000, 32), "user"),
        Profile("kvpress", templates.KVPRESS, {task: room + 20 for task, room in _OFFICIAL.items()}, "user", seam="\n"),
    )
}


def get_profile(name: str) -> Profile:
    """The profile of that name.  Raises ConfigError listing the known ones."""
    if name not in PROFILES:
        raise ConfigError(f"profile {name!r} is unknown; choose from {', '.join(PROFILES)}")
    return PROFILES[name]
