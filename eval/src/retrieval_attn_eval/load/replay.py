"""Replay: the requests of a trace sent to a server when they are due, whether or not earlier ones are answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from retrieval_attn.testing import ProgressBar
from retrieval_attn_eval.load.line import Line
from retrieval_attn_eval.load.reply import Reply
from retrieval_attn_eval.load.sender import Sender
from retrieval_attn_eval.load.words import Words

__all__ = ["Replay"]


class Replay:
    """An open loop: only turns with a delay wait, for the answer to their session's turn before."""

    def __init__(self, lines: Sequence[Line], *, speed: float = 1.0, waits: bool = True) -> None:
        """speed: how much faster than written the trace runs. waits: False sends every line at its timestamp."""
        self._lines, self._speed, self._waits = lines, speed, waits
        self.numbered: dict[int, Reply] = {}
        """Replies so far by the number of their line, in order of their ends."""

    @property
    def replies(self) -> list[Reply]:
        """Replies so far, in order of their ends."""
        return list(self.numbered.values())

    async def run(self, sender: Sender, words: Words) -> None:
        """Send all of it. `numbered` grows as requests end, so that what came is known if this is cancelled."""
        began = time.perf_counter()
        before: dict[str, asyncio.Task[Reply]] = {}
        shown = ProgressBar(total=len(self._lines), desc="replaying", unit="request", leave=False)
        with shown as bar:
            async with asyncio.TaskGroup() as group:
                for number, line in enumerate(self._lines):
                    waits = self._waits and line.delay is not None and line.session is not None
                    earlier = before.get(line.session or "") if waits else None
                    task = group.create_task(self._one(number, line, earlier, sender, words, began))
                    task.add_done_callback(lambda _: bar.update())
                    if line.session is not None:
                        before[line.session] = task

    async def _one(
        self, number: int, line: Line, earlier: asyncio.Task[Reply] | None, sender: Sender, words: Words, began: float
    ) -> Reply:
        due = line.seconds / self._speed
        if earlier is not None:
            # of a conversation, what comes first counts from the answer: a user reads it before the next question
            due = max((await earlier).end + (line.delay or 0.0) / self._speed, 0.0)
        texts = words.texts(line.blocks)
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        reply = await sender.send(line, texts, due, began)
        self.numbered[number] = reply
        return reply
