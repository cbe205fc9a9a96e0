"""Rows of `bench serve` that ask a server over HTTP: the same lines as a raw text and in two forms of a chat."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from retrieval_attn.errors import RetrievalAttentionError
from retrieval_attn.testing import Endpoint, ProgressBar
from retrieval_attn_eval.bench.serve.answered import Answered
from retrieval_attn_eval.bench.serve.cache_use import cache_use, metric_counts
from retrieval_attn_eval.bench.serve.row import Bounds, Row, row_of
from retrieval_attn_eval.bench.serve.simulated import PromptTree
from retrieval_attn_eval.load.line import Line
from retrieval_attn_eval.load.replay import Replay
from retrieval_attn_eval.load.reply import Reply
from retrieval_attn_eval.load.sender import Asking, Sender
from retrieval_attn_eval.load.words import Words

__all__ = ["server_rows"]

REFUSED = ("429", "503")
"""HTTP statuses of a request that was refused for now."""
OTHER_TEXTS = 1009
"""Difference of the seeds of two rows, which must not find each other's texts."""


def server_rows(
    endpoint: Endpoint, model: str, forms: Sequence[str], lines: Sequence[Line], *, bounds: Bounds, seed: int,
    timeout: float,
) -> Iterator[Row]:  # fmt: skip
    """Yield the row of each form when it is measured.

    Args:
        endpoint: server.
        model: name of the model there.
        forms: of `sender.FORMS`.
        lines: requests in order.
        bounds: bounds of a good answer.
        seed: seed of the texts. Each form has its own texts.
        timeout: seconds of one request.
    """
    for number, form in enumerate(forms):
        asking = Asking(model, body={"ignore_eos": True}, form=form)
        try:
            yield asyncio.run(_row(endpoint, asking, lines, bounds, seed + number * OTHER_TEXTS, timeout))
        except RetrievalAttentionError as error:  # other forms may be answered
            yield Row(form, "failed", f"{type(error).__name__}: {error}"[:300])


async def _row(
    endpoint: Endpoint, asking: Asking, lines: Sequence[Line], bounds: Bounds, seed: int, timeout: float
) -> Row:
    async with Sender(endpoint, asking, timeout) as sender:
        words = Words(seed, await sender.rate())
        prompts = []
        for line in ProgressBar(iterable=lines, desc="tokenizing", unit="prompt", delay=2.0, leave=False):
            prompts.append(np.asarray(await sender.tokens(words.texts(line.blocks)), np.int32))
        replay = Replay(lines)
        before = metric_counts(await sender.metrics())
        await replay.run(sender, words)
        counts = metric_counts(await sender.metrics()).since(before)
    answers = [_answered(replay.numbered[number], len(ids)) for number, ids in enumerate(prompts)]
    return replace(row_of(asking.form, answers, bounds, None), use=cache_use(answers, PromptTree(prompts), counts))


def _answered(reply: Reply, prompt_tokens: int) -> Answered:
    """The outcome of a reply. prompt_tokens: of its prompt, if the server does not count."""
    usage = reply.usage
    refused = reply.status in REFUSED
    problem = "" if reply.status == "ok" else f"{reply.status}: {reply.problem}"
    if not problem and reply.tokens < reply.wanted:
        problem = f"ended after {reply.tokens} of {reply.wanted} tokens"
    return Answered(
        reply.due,
        reply.times or ((reply.end,) if reply.status == "ok" else ()),
        (-1,) * reply.tokens if reply.status == "ok" else (),
        prompt_tokens if usage is None else usage.prompt_tokens,
        0 if usage is None else usage.cached_tokens,
        problem,
        refused,
    )
