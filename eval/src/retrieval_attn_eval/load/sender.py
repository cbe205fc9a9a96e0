"""Sender: one request of a replay, sent and listened to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrieval_attn.testing import Endpoint, RemoteError, Usage, http_client, read_delta, read_usage, refusal
from retrieval_attn_eval.load.line import Block, Line
from retrieval_attn_eval.load.reply import Reply
from retrieval_attn_eval.load.words import Rate, Words

__all__ = ["FORMS", "Asking", "Sender"]

PARAGRAPH = "\n\n"
ROLES = ("user", "assistant")
FORMS = ("completions", "chat-user", "chat-system")
"""Forms of a prompt whose first text is a document or a system prompt: a raw text, or messages with this text in the
first message of the user or of the system.
"""
PROBE_SEED = -1
"""Of no replay: probes must not be found in its prompts."""
PROBES = ((64,), (320,), (64, 64, 192))
"""Words of the messages of three prompts: a template adds as much to the first two, and more to the third."""


@dataclass(frozen=True)
class Asking:
    """Fields of every request.

    Attributes:
        model: name of the model.
        scale: factor of answer lengths.
        body: members to add to the request.
        form: one of FORMS, or "chat" for texts that are the turns of a chat.
    """

    model: str
    scale: float = 1.0
    body: Mapping[str, Any] = field(default_factory=dict)
    form: str = "chat"

    @property
    def path(self) -> str:
        """Path of the API."""
        return "completions" if self.form == "completions" else "chat/completions"

    def request(
        self, texts: Sequence[str], answer_tokens: int, extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the body of a request for `answer_tokens` tokens after texts."""
        given = {"model": self.model, "max_tokens": answer_tokens, "temperature": 0.0}
        return {**given, **self.prompt(texts), **self.body, **(extra or {})}

    def prompt(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return the member "prompt" or "messages" of a request for an answer after texts.

        Servers may share whole messages alone. So each text is a message, and the last one is the user's: of an even
        number of texts, the last two are one message in a chat, and the first two with a document. Texts of a raw
        prompt are joined by blank lines.
        """
        if self.form == "completions":
            return {"prompt": PARAGRAPH.join(texts)}
        system = list(texts[:1]) if self.form == "chat-system" and len(texts) > 1 else []
        odd = list(texts[len(system) :])
        if len(odd) % 2 == 0:
            place = -2 if self.form == "chat" else 0
            odd[place : place + 2 or None] = [PARAGRAPH.join(odd[place : place + 2 or None])]
        messages = [{"role": ROLES[n % 2], "content": text} for n, text in enumerate(odd)]
        return {"messages": [*({"role": "system", "content": text} for text in system), *messages]}

    def wanted(self, line: Line) -> int:
        """Tokens of the answer."""
        return max(1, round(line.answer_tokens * self.scale))


class Sender:
    """Sends requests over as many connections as there are at once. Use it in an `async with` block."""

    def __init__(self, endpoint: Endpoint, asking: Asking, timeout: float) -> None:
        """timeout: seconds of one request, from when it is sent to its last token. Raises ConfigError (no httpx)."""
        self._httpx = http_client()
        self._endpoint, self._asking, self._timeout = endpoint, asking, timeout

    async def __aenter__(self) -> Sender:
        # an open loop: nothing on this side may make a request wait for another
        limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = self._httpx.AsyncClient(headers=self._endpoint.headers, limits=limits, timeout=None)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def rate(self) -> Rate:
        """How the server counts `Words`; one a token where it does not count.

        Raises RemoteError, with what was said, for a server that does not answer such requests.
        """
        counts = []
        for sizes in PROBES:
            texts = Words(PROBE_SEED).texts(tuple(Block(number, size) for number, size in enumerate(sizes)))
            found = await self._answer(self._endpoint.at(self._asking.path), self._asking.request(texts, 1))
            usage = read_usage(found.get("usage"))
            counts.append(0 if usage is None else usage.prompt_tokens)
        short, long, parted = counts
        if long <= short:
            return Rate()
        (few,), (many,), parts = PROBES
        return Rate((many - few) / (long - short), max(0.0, (parted - long) / (len(parts) - 1)))

    async def tokens(self, texts: Sequence[str]) -> list[int]:
        """Token ids of a prompt, by the server's /tokenize. Raises RemoteError if the server has none."""
        url = f"{self._endpoint.base.removesuffix('/v1')}/tokenize"
        found = (await self._answer(url, {"model": self._asking.model, **self._asking.prompt(texts)})).get("tokens")
        if not isinstance(found, list) or not found:
            raise RemoteError(f"{url} returned no token ids, which the ceiling of the hit rate is computed from")
        return found

    async def metrics(self) -> str:
        """Text of the server's /metrics; "" if it gives none."""
        try:
            response = await self._client.get(
                f"{self._endpoint.base.removesuffix('/v1')}/metrics", timeout=self._timeout
            )
        except self._httpx.HTTPError:
            return ""
        return str(response.text) if response.status_code == 200 else ""

    async def send(self, line: Line, texts: Sequence[str], due: float, began: float) -> Reply:
        """Send now, and wait for all of the answer. began: of the replay, by `time.perf_counter`; never raises for
        what the server or the connection does.
        """
        body = self._asking.request(texts, self._asking.wanted(line), line.extra)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        heard = _Heard(began)
        sent = time.perf_counter() - began
        try:
            async with asyncio.timeout(self._timeout):
                status, problem = await self._listen(body, heard)
        except TimeoutError:
            status, problem = "timeout", f"no end within {self._timeout:g} s"
        end = heard.ended if heard.ended is not None else time.perf_counter() - began
        return Reply(due, sent, end, tuple(heard.times), self._asking.wanted(line), heard.usage, status, problem)

    async def _listen(self, body: Mapping[str, Any], heard: _Heard) -> tuple[str, str]:
        url = self._endpoint.at(self._asking.path)
        try:
            async with self._client.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    return str(response.status_code), refusal(await response.aread())
                async for one in response.aiter_lines():
                    if (said := heard.line(one)) is not None:
                        return said
        except self._httpx.HTTPError as error:
            return ("broken" if heard.times else "connection"), f"{type(error).__name__}: {error}"
        return ("ok", "") if heard.ended is not None else ("broken", "the stream ended without a finish_reason")

    async def _answer(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = await self._client.post(url, json=body, timeout=self._timeout)
        except self._httpx.HTTPError as error:
            raise RemoteError(
                f"cannot reach {url} ({type(error).__name__}: {error}); check that a server is running there"
            ) from None
        if response.status_code != 200:
            raise RemoteError(f"{url} answered {response.status_code}: {refusal(response.content)}")
        found = response.json()
        return found if isinstance(found, dict) else {}


class _Heard:
    """What came of one answer so far."""

    def __init__(self, began: float) -> None:
        self._began = began
        self.times: list[float] = []
        self.usage: Usage | None = None
        self.ended: float | None = None  # the last token's time: usage and [DONE] come behind it

    def line(self, line: str) -> tuple[str, str] | None:
        """Take in a line of the stream; status and problem once nothing is to come."""
        delta = read_delta(line)
        if delta is None:
            return None
        if delta.error:
            return "broken", delta.error
        now = time.perf_counter() - self._began
        if delta.text:
            self.times.append(now)
        if delta.finish:
            self.ended = now
        self.usage = delta.usage or self.usage
        if delta.done:
            return ("ok", "") if self.ended is not None else ("broken", "[DONE] came before a finish_reason")
        return None
