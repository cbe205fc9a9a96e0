"""RemoteBackend: chat with a server that has OpenAI's API; contexts are saved at the server."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from retrieval_attn.cli.chat.backend import ChatBackend, Message
from retrieval_attn.cli.output import Spinner
from retrieval_attn.errors import InputDataError
from retrieval_attn.remote import Endpoint, RemoteError, Usage, http_client, read_delta, refusal
from retrieval_attn.sampling.sampling_params import Sampling

CONNECT_SECONDS = 30.0


@dataclass(frozen=True)
class RemoteMark:
    """document: start of the first message, "" without one. context: saved context that the messages continue."""

    document: str
    context: str | None
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Cost:
    """Cost of an answer: seconds to its first text and to its end, pieces of text, the server's token counts."""

    first_seconds: float
    seconds: float
    pieces: int
    usage: Usage | None


class RemoteBackend(ChatBackend):
    """A ChatBackend over HTTP. Each request has the whole conversation; the server prefills what its cache lacks."""

    def __init__(self, endpoint: Endpoint, model: str, sampling: Sampling, document: str = "") -> None:
        """document: start of the first message. Raises ConfigError if httpx is not installed."""
        super().__init__()
        self._httpx = http_client()
        # prefill of a long text may take minutes; Ctrl-C ends the request
        timeout = self._httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._client = self._httpx.Client(headers=endpoint.headers, timeout=timeout)
        self._endpoint, self._model, self._sampling = endpoint, model, sampling
        self._document = document
        self._context: str | None = None
        self._cost: Cost | None = None

    @property
    def about(self) -> str:
        read = f", about a document of {len(self._document):,} characters" if self._document else ""
        return f"{self._model} at {self._endpoint.base}{read}"

    def answer(self, question: str) -> Generator[str, None, None]:
        messages = self._asked(question)
        began, first, usage, ended = time.perf_counter(), 0.0, None, False
        pieces: list[str] = []
        self._cost = None
        try:
            with Spinner("waiting for the server") as waiting, self._stream(messages) as lines:
                for line in lines:
                    delta = read_delta(line)
                    if delta is None:
                        continue
                    if delta.error:
                        raise RemoteError(f"The answer ended early: {delta.error}")
                    usage = delta.usage or usage
                    if delta.text:
                        waiting.end()
                        first = first or time.perf_counter() - began
                        pieces.append(delta.text)
                        yield delta.text
                    ended = ended or bool(delta.finish)
                    if delta.done:
                        break
            if not ended:
                raise RemoteError("The answer ended early: the server closed the connection; ask again")
        except self._httpx.HTTPError as error:
            raise self._unreachable(error) from None
        finally:
            self._cost = Cost(first, time.perf_counter() - began, len(pieces), usage)
            self._keep(messages, pieces)

    def fork(self, name: str) -> tuple[RemoteMark, str]:
        """See `ChatBackend`. The server's saved context of the conversation gets `name` as a second name.

        Its first name can then be reused. Raises RemoteError if `name` is taken at the server.
        """
        context, told = self._context, f"remembered as {name!r} until the program ends"
        if context is not None:
            self._called("POST", f"contexts/{context}/fork", {"name": name})
            context, told = name, f"{told}; the server keeps the context {context!r} as {name!r} too"
        return RemoteMark(self._document, context, tuple(self._messages)), told

    def go_back(self, mark: RemoteMark) -> str:
        self._document, self._context, self._messages = mark.document, mark.context, list(mark.messages)
        return f"back at {self._turns()}"

    def save(self, name: str) -> str:
        """See `ChatBackend`. Raises RemoteError if the server cannot save contexts."""
        body: dict[str, Any] = {"name": name}
        path = "contexts" if self._context is None else f"contexts/{self._context}/save"
        if self._messages:
            body["messages"] = self._sent(self._messages)
        elif self._document:
            body["text"] = self._document
        elif self._context is not None:
            path = f"contexts/{self._context}/fork"
        else:
            raise InputDataError("There is nothing to save: no document was given and no question was asked.")
        found = self._called("POST", path, body)
        return f"saved {found.get('tokens', 0):,} tokens as {name!r} at the server; /load {name} goes on from it"

    def load(self, name: str) -> str:
        found = self._called("GET", f"contexts/{name}")
        self._document, self._context, self._messages = "", name, []
        return f"loaded {name!r}: {found.get('tokens', 0):,} tokens"

    def stats(self) -> str:
        context = "" if self._context is None else f" behind the context {self._context!r}"
        told = f"{self._turns()}{context}"
        cost = self._cost
        if cost is None or not cost.pieces:
            return told
        counted = "" if cost.usage is None else (
            f"{cost.usage.prompt_tokens:,} prompt tokens, {cost.usage.cached_tokens:,} of them cached, "
            f"{cost.usage.answer_tokens} generated, "
        )  # fmt: skip
        tokens = cost.pieces if cost.usage is None else cost.usage.answer_tokens
        gap = (cost.seconds - cost.first_seconds) / max(1, tokens - 1)
        first = f"first token after {cost.first_seconds:.2f} s"
        return f"{told}\nlast answer: {counted}{first}, then {1000 * gap:.1f} ms per token"

    def close(self) -> None:
        self._client.close()

    def _stream(self, messages: list[Message]) -> _ReplyLines:
        sampling = self._sampling
        body: dict[str, Any] = {
            "model": self._model,
            "messages": self._sent(messages),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if self._context is not None:
            body["context"] = self._context
        url = self._endpoint.at("chat/completions")
        return _ReplyLines(self._client.stream("POST", url, json=body), url)

    def _sent(self, messages: list[Message]) -> list[Message]:
        """Return the messages with the document at the start of the first one."""
        if not self._document:
            return messages
        first = messages[0]
        return [{**first, "content": f"{self._document}\n\n{first['content']}"}, *messages[1:]]

    def _called(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        url = self._endpoint.at(path)
        try:
            with Spinner("waiting for the server"):
                response = self._client.request(method, url, json=body)
        except self._httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise RemoteError(f"{url} answered {response.status_code}: {refusal(response.content)}")
        found = response.json()
        return found if isinstance(found, dict) else {}

    def _unreachable(self, error: Exception) -> RemoteError:
        return RemoteError(
            f"cannot reach {self._endpoint.base} ({type(error).__name__}: {error}); check that a server is running "
            "there"
        )


class _ReplyLines:
    """Lines of a streamed answer inside a `with` block; leaving it early stops the server's generation."""

    def __init__(self, opened: Any, url: str) -> None:
        """opened: return value of `httpx.Client.stream`."""
        self._opened, self._url = opened, url

    def __enter__(self) -> Any:
        response = self._opened.__enter__()
        if response.status_code != 200:
            said = refusal(response.read())
            self._opened.__exit__(None, None, None)
            raise RemoteError(f"{self._url} answered {response.status_code}: {said}")
        return response.iter_lines()

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)
