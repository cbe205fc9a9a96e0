"""EchoForm: text completions that begin with their prompt, as `echo` asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrieval_attn.engine.request import Event, Finished
from retrieval_attn.server.formatting import TextForm, TokenTexts

__all__ = ["EchoForm"]


class EchoForm(TextForm):
    """A `Form` of POST /v1/completions with `echo`. With `logprobs`, tokens of the prompt have theirs, the first null.

    Evaluations score texts so: they send text and continuation as the prompt, and ask for at most one token.
    """

    def __init__(
        self, model: str, texts: TokenTexts, top: int, prompts: Sequence[tuple[str, Sequence[int]]], *, answers: bool
    ) -> None:
        """model, texts, top: as in `TextForm`. prompts: text and token ids of each choice's. answers: False: the
        choices are their prompts alone (max_tokens=0).
        """
        super().__init__(model, texts, top)
        self._prompts, self._answers = prompts, answers

    def opening(self, index: int) -> bytes:
        """See `Form`."""
        return self._chunk(index, self._prompts[index][0])

    def whole(
        self, ends: Mapping[int, Finished], events: Mapping[int, Sequence[Event]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """See `Form`."""
        if not self._answers:
            ends = {index: end._replace(text="", tokens=()) for index, end in ends.items()}
            events = {index: () for index in events}
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        whole = super().whole(
            {index: end._replace(text=self._prompts[index][0] + end.text) for index, end in ends.items()},
            {index: [*self._scored(index, ends[index]), *events[index]] for index in events},
            usage,
        )
        for logprobs in (choice["logprobs"] for choice in whole["choices"] if choice["logprobs"]):
            logprobs["token_logprobs"][0] = None  # nothing is before it
            if logprobs["top_logprobs"]:
                logprobs["top_logprobs"][0] = None
        return whole

    def _scored(self, index: int, end: Finished) -> list[Event]:
        """The tokens of a choice's prompt as events."""
        first, *others = self._prompts[index][1]
        scored = zip(others, end.prompt, strict=True)
        return [Event(first, ""), *(Event(token, "", score.logprob, score.top) for token, score in scored)]
