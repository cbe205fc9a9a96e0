"""Settings of a server: limits of requests, and the engine to load. Imports no torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from retrieval_attn.engine.limits import KEEP_SESSION_SECONDS
from retrieval_attn.errors import ConfigError, RetrievalAttentionError
from retrieval_attn.imports import FIRST_IMPORT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from retrieval_attn.engine.engine import Engine
    from retrieval_attn.llm import LLM
    from retrieval_attn.store import ContextStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """name: of the model, as clients know it. aliases: its other names. any_name: serve it under every name.

    body_bytes: of a request, at most. waiting_requests, waiting_tokens: that
    may wait for their first token; more are told to come again. wait_seconds: that one may have to wait for its first
    token, as expected from the pace of late; who had to wait longer is told to come again. deadline_seconds: from a
    request to its last token. drain_seconds: for answers under way when the server is told to end. answer_tokens: of an
    answer whose request says nothing about it. choices: `n` of a request, at most. connections: of one address, at
    most. allowed_hosts: names of this server in requests without a key, in addition to those of this machine; "*": any.
    cors: origins of web pages that may use it from a browser, such as https://chat.example. parse_special: words of
    special tokens in raw prompts become these tokens. response_bytes: of responses that later requests continue by id.
    Raises ConfigError for a number below 1, a name with "@", or an origin with a path.
    """

    name: str
    body_bytes: int = 64 << 20
    waiting_requests: int = 256
    waiting_tokens: int = 4 << 20
    wait_seconds: float = 60.0
    deadline_seconds: float = 600.0
    drain_seconds: float = 30.0
    answer_tokens: int = 1024
    choices: int = 16
    connections: int = 512
    allowed_hosts: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    parse_special: bool = False
    aliases: tuple[str, ...] = ()
    any_name: bool = False
    response_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name in self.names:
            if not name or "@" in name:
                raise ConfigError(
                    f'A model\'s name must not be empty or have "@", got {name!r}: MODEL@CONTEXT names a context.'
                )
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value >= 1:
                raise ConfigError(f"{field.name} must be at least 1, got {value!r}.")
        for origin in self.cors:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not rest or "/" in rest):
                raise ConfigError(f"--cors needs an origin, SCHEME://HOST or SCHEME://HOST:PORT, or *; got {origin!r}.")

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model."""
        return (self.name, *self.aliases)

    @property
    def held_body_bytes(self) -> int:
        """Maximum bytes of all request bodies in memory."""
        return 4 * self.body_bytes


WARM_TOKENS = 16_384
"""Tokens that a server without a GPU warms up for if nothing is said; with one, LAYOUT_TOKENS. Graphs of steps serve
shorter rows as fast, and longer ones need others: a second set that the first long answer waits for, and less GPU
memory for texts (docs/archive/log.md, 2026-12-01: graphs for 128K from the start)."""
GENERATION_CONFIGS = ("auto", "none", "vllm")
"""Of `--generation-config`: use the model's sampling values, or neutral ones ("vllm" is vLLM's word for "none")."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Values of a generation config that requests get by default, as in vLLM."""


class Facts(NamedTuple):
    """Facts of a loaded model. vocabulary: number of embeddings. positions: maximum tokens of a prompt with its answer.
    sampling: default fields of `SamplingParams`. positions_reason: see `ContextLimit`. has_vision: whether it has a
    vision tower.
    """

    vocabulary: int
    positions: int
    sampling: Mapping[str, Any] = MappingProxyType({})
    positions_reason: str = ""
    has_vision: bool = False


@dataclass(frozen=True)
class EngineSpec:
    """model: folder or hub name. loading: keywords of `LLM`. config: `Config.to_dict`. rows, prefix_cache_bytes,
    prefix_cache_device_bytes, prefix_cache_disk_bytes: None: as the engine chooses. store: folder of saved contexts and
    of idle texts that host memory has no room for; None: the user's.
    warm_tokens: of `Engine.warm_up`; 0: none; None: see WARM_TOKENS. cache_generated, keep_session_seconds: of
    `Engine`. generation_config: one of GENERATION_CONFIGS.
    """

    model: str
    loading: dict[str, Any]
    config: dict[str, Any]
    rows: int | None = None
    prefix_cache_bytes: int | None = None
    prefix_cache_device_bytes: int | None = None
    prefix_cache_disk_bytes: int | None = None
    paged_prefix_tokens: int = 0
    store: str | None = None
    warm_tokens: int | None = 0
    cache_generated: bool = True
    keep_session_seconds: float = KEEP_SESSION_SECONDS
    generation_config: str = "auto"

    def __post_init__(self) -> None:
        if self.generation_config not in GENERATION_CONFIGS:
            raise ConfigError(
                f"generation_config must be one of {', '.join(GENERATION_CONFIGS)}; got {self.generation_config!r}."
            )

    def load(self, on_loaded: Callable[[], object] = lambda: None) -> tuple[LLM, Engine]:
        """Load the model and start its engine, warm for one row; log the seconds. Raises as `LLM` and `Engine`.

        on_loaded: called before graphs are captured.
        """
        from retrieval_attn.config import Config
        from retrieval_attn.engine.engine import Engine, default_limits
        from retrieval_attn.llm import LLM
        from retrieval_attn.memory.device_room import LAYOUT_TOKENS
        from retrieval_attn.model.rope import ContextLimit, limit_context
        from retrieval_attn.store import ContextStore

        began = time.perf_counter()
        llm = LLM(self.model, **self.loading, config=Config.from_dict(self.config))
        loaded = time.perf_counter()
        if self.loading.get("max_context") is not None:
            reason, cure = "--max-context of this server", "start it with a larger one"
            limit_context(llm.model, ContextLimit(llm.max_context, reason, cure))
        self._sampling(llm.model)  # what is wrong with it is said before the engine starts
        limits = default_limits(llm.model, llm.config).sharing(self.prefix_cache_device_bytes)
        if self.rows is not None:
            limits = replace(limits, rows=self.rows)
        store = ContextStore(self.store)
        engine = Engine(
            llm,
            limits=limits,
            prefix_cache_bytes=self.prefix_cache_bytes,
            prefix_cache_disk_bytes=self.prefix_cache_disk_bytes,
            store=store,
            paged_prefix_tokens=self.paged_prefix_tokens,
            cache_generated=self.cache_generated,
            keep_session_seconds=self.keep_session_seconds,
        )
        started = time.perf_counter()
        on_loaded()
        on_gpu = llm.model.device.type == "cuda"
        if self.warm_tokens != 0:
            tokens = self.warm_tokens or (LAYOUT_TOKENS if on_gpu else WARM_TOKENS)
            engine.warm_up(tokens=min(tokens, llm.max_context), progress=False, background=True)
        ready = time.perf_counter()
        opens = on_gpu  # elsewhere a context is mapped from its files, and that is all
        threading.Thread(target=_tend, args=(engine, store, opens), name="retrieval_attn-gc", daemon=True).start()
        log.info(
            "ready after %.1f s: imports %.1f, model %.1f, engine %.1f, first graphs %.1f",
            ready - FIRST_IMPORT, began - FIRST_IMPORT, loaded - began, started - loaded, ready - started,
        )  # fmt: skip
        return llm, engine

    def facts(self, llm: LLM) -> Facts:
        """Return the facts of the loaded model."""
        from retrieval_attn.answer_loop import AnswerLoop
        from retrieval_attn.model.adapters import unwrapped
        from retrieval_attn.model.rope import context_limit

        vocabulary = AnswerLoop(llm.model, llm.tokenizer).vocabulary
        has_vision = getattr(unwrapped(llm.model).config, "vision_config", None) is not None
        reason = context_limit(llm.model).reason
        return Facts(vocabulary, llm.max_context, self._sampling(llm.model), reason, has_vision)

    def _sampling(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return the values that the model's generation config sets. Raises ConfigError for one out of its range."""
        from retrieval_attn.sampling.sampling_params import SamplingParams

        if self.generation_config != "auto" or model.generation_config is None:
            return {}
        given = model.generation_config.to_diff_dict()
        found = {name: given[name] for name in SAMPLING if given.get(name) is not None}
        try:
            SamplingParams(**found)
        except ConfigError as error:
            raise ConfigError(
                f"The model's generation_config.json has a value that cannot be a default: {error} Correct it, or "
                "start with --generation-config none."
            ) from error
        return found


def _tend(engine: Engine, store: ContextStore, opens: bool) -> None:
    """Clean the store; then have the newest saved context opened, if it is to be."""
    engine.clean_store()
    if opens:
        open_newest(engine, store)


def open_newest(engine: Engine, store: ContextStore) -> str | None:
    """Ask the newest saved context for two tokens, before graphs of more rows are captured, and return its name.

    Its codes and windows are then on the GPU, and threads make its int8 rows. Otherwise the first questions of a new
    process wait for the files, and the CPU attends for their tokens. The context is evicted like other idle texts.
    None: there is none, or it cannot be opened; the error is logged.
    """
    from retrieval_attn.engine.request import Request

    name, began = "", time.perf_counter()
    try:
        named = [one for one in store.list() if not one.is_automatic]
        if not named:
            return None
        name = max(named, key=lambda one: one.saved_at).name
        # the first token comes from reading, the second from a step, which asks for the rows
        engine.submit(Request(((0,),), 2, context=name, priority="batch")).result()
    except RetrievalAttentionError as error:
        log.info("the saved context %r was not opened ahead: %s", name, error)
        return None
    log.info("opened the saved context %r ahead in %.1f s", name, time.perf_counter() - began)
    return name
