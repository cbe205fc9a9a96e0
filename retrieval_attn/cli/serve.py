"""`retrieval-attn serve MODEL`: a server that OpenAI's clients know how to use."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from retrieval_attn.cli.model_args import (
    add_config_arguments,
    add_model_arguments,
    add_store_argument,
    check_model_flags,
    config_of,
    tokens_or_zero,
)
from retrieval_attn.cli.output import Spinner
from retrieval_attn.engine.limits import KEEP_SESSION_SECONDS
from retrieval_attn.errors import ConfigError
from retrieval_attn.imports import skip_unused
from retrieval_attn.memory.units import parse_bytes, parse_tokens
from retrieval_attn.model.bundled import model_path

if TYPE_CHECKING:
    from retrieval_attn.server.settings import EngineSpec

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommand."""
    add_model_arguments(parser, positional=True)
    parser.add_argument(
        "--max-context",
        metavar="N",
        help="tokens of a prompt with its answer (default: the model's, or as many as fit)",
    )
    add_config_arguments(parser)
    add_store_argument(parser)
    where = parser.add_argument_group("address and access")
    where.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; any but a loopback address needs a key (default: %(default)s)",
    )
    where.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)")
    where.add_argument(
        "--name",
        action="append",
        metavar="NAME",
        help="model name for clients, repeatable (default: MODEL, or the last part of its path)",
    )
    where.add_argument(
        "--any-model", action="store_true", help="answer requests for any model name (default: other names get 404)"
    )
    where.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file with a line KEY, KEY NAME or KEY NAME admin per key; $RETRIEVAL_ATTN_API_KEY is an admin key "
        "(default: no keys)",
    )
    where.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="Host header to accept without keys, repeatable; '*' accepts any (default: names of this machine)",
    )
    where.add_argument(
        "--cors",
        action="append",
        metavar="ORIGIN",
        help="origin of web pages that may call the server, such as https://chat.example; repeatable (default: none)",
    )
    where.add_argument(
        "--parse-special",
        action="store_true",
        help="parse special-token words in prompts of /v1/completions and /tokenize (default: encode them as text)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences in a batch (default: 16)")
    limits.add_argument(
        "--max-queue", type=int, default=256, metavar="N", help="requests waiting for their first token (%(default)s)"
    )
    limits.add_argument(
        "--max-queue-tokens", default="4M", metavar="N", help="prompt tokens of waiting requests (%(default)s)"
    )
    limits.add_argument(
        "--queue-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="refuse a request whose first token is expected later than this many seconds (%(default)s)",
    )
    limits.add_argument("--max-body", default="64MiB", metavar="SIZE", help="bytes of a request body (%(default)s)")
    limits.add_argument(
        "--max-connections", type=int, default=512, metavar="N", help="connections per client address (%(default)s)"
    )
    limits.add_argument(
        "--max-tokens-default",
        default="1024",
        metavar="N",
        help="answer tokens of a request without max_tokens (%(default)s)",
    )
    limits.add_argument(
        "--deadline",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds from a request to its last token (%(default)s)",
    )
    limits.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for running answers at shutdown (%(default)s)",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--engine",
        choices=("auto", "here", "process"),
        default="auto",
        help="run the engine in the server's process, or in a child process that is restarted if it fails; auto: "
        "a child process on a GPU (default: %(default)s)",
    )
    engine.add_argument(
        "--prefix-cache-memory",
        metavar="SIZE",
        help="host memory for idle cached prefixes (default: all that requests leave of three quarters of the free "
        "memory)",
    )
    engine.add_argument(
        "--prefix-cache-gpu-memory",
        metavar="SIZE",
        help="GPU memory for idle cached prefixes (default: all that weights, batch and a prefill leave)",
    )
    engine.add_argument(
        "--prefix-cache-disk",
        metavar="SIZE",
        help="disk for idle cached prefixes that exceed their host memory, in the folder of --store; 0: prompts are "
        "not written to the disk (default: half of the free disk)",
    )
    engine.add_argument(
        "--no-cache-generated",
        action="store_true",
        help="prefill generated answers again in the next turn (default: cache their KV)",
    )
    engine.add_argument(
        "--keep-session",
        type=float,
        default=KEEP_SESSION_SECONDS / 60,
        metavar="MIN",
        help=f"minutes in which a session is evicted last ({KEEP_SESSION_SECONDS / 60:g})",
    )
    engine.add_argument(
        "--generation-config",
        choices=("auto", "none", "vllm"),
        default="auto",
        help="default sampling parameters: auto: the model's generation_config.json; none, vllm: neutral values, "
        "temperature 1 (default: %(default)s)",
    )
    engine.add_argument(
        "--paged-prefix-tokens",
        default="0",
        metavar="N",
        help="keep prompt prefixes of up to N tokens in GPU pages with full attention (%(default)s)",
    )
    engine.add_argument(
        "--warm-up",
        default="auto",
        metavar="N",
        help="compile kernels and capture graphs for prompts of up to N tokens: of one sequence before the first "
        "request, of more while no request runs; auto: 128k on a GPU, else 16k; 0: do not (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Answer until SIGTERM or Ctrl-C. Logs are lines of JSON on the error output."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serve needs {', '.join(missing)}; in a checkout: pip install '.[serve]', elsewhere: pip install "
            "'retrieval-attn[serve]'"
        )
    check_model_flags(args)
    config_of(args)

    from retrieval_attn.server.engine_process import set_allocator

    set_allocator()
    import asyncio

    from retrieval_attn.compile.gc_pause import no_gc
    from retrieval_attn.server.access import Address, Keys, listening, require_safe_host
    from retrieval_attn.server.engine_process import Child
    from retrieval_attn.server.settings import Settings

    name, *aliases = args.name or [_name_of(args.model)]
    settings = Settings(
        name=name,
        aliases=tuple(aliases),
        any_name=args.any_model,
        body_bytes=parse_bytes(args.max_body, "--max-body"),
        waiting_requests=args.max_queue,
        waiting_tokens=parse_tokens(args.max_queue_tokens, "--max-queue-tokens"),
        wait_seconds=args.queue_timeout,
        deadline_seconds=args.deadline,
        drain_seconds=args.shutdown_timeout,
        answer_tokens=parse_tokens(args.max_tokens_default, "--max-tokens-default"),
        connections=args.max_connections,
        allowed_hosts=tuple(args.allowed_host or ()),
        cors=tuple(args.cors or ()),
        parse_special=args.parse_special,
    )
    keys = Keys.of(args.api_key_file)
    if "*" in settings.cors and not keys:
        raise ConfigError("--cors '*' lets every web page use a server that needs no key: name origins, or give keys.")
    require_safe_host(args.host, has_keys=bool(keys))
    with listening(Address(args.host, args.port)) as sock:  # before the model: a port that is taken is said at once
        signal.signal(signal.SIGINT, _end_at_once)
        host, port = sock.getsockname()[:2]
        starting = _Starting(settings.name, f"http://{_reached(host)}:{port}", has_keys=bool(keys))
        spec = _spec(args)
        child = Child.start(spec) if _apart(args) else None
        with no_gc():
            skip_unused()
            from uvicorn.loops.auto import auto_loop_factory

            from retrieval_attn.server.logs import log_as_json
            from retrieval_attn.server.run import serve

        log_as_json()
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:  # uvloop's, where it is installed
            runner.run(serve(spec, sock, settings, keys, child, on_ready=starting.ready))
    return 0


NVIDIA = Path("/dev/nvidiactl")
"""Exists if the driver of an NVIDIA GPU is loaded."""


class _Starting:
    """Messages of a start: a line before the model is loaded, its seconds at a terminal, and a request to try.

    Without a terminal all lines are JSON, as those of the log.
    """

    def __init__(self, name: str, url: str, *, has_keys: bool) -> None:
        """name: the model's, for clients. has_keys: whether requests need a key."""
        self._name, self._url, self._has_keys = name, url, has_keys
        self._waiting: Spinner | None = None
        text = f"loading {name}; requests to {url} get 503 until it is ready"
        if sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)
            self._waiting = Spinner(f"loading {name}").__enter__()
        else:
            now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
            line = {"time": f"{now}.000Z", "level": "info", "logger": __name__, "message": text}
            print(json.dumps(line), file=sys.stderr, flush=True)

    def ready(self) -> None:
        """Print a request that works as it stands."""
        if self._waiting is None:
            return
        self._waiting.end()
        key = ' -H "authorization: Bearer $RETRIEVAL_ATTN_API_KEY"' if self._has_keys else ""
        body = json.dumps({"model": self._name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32})
        print(
            f"ready; try in another terminal:\ncurl {self._url}/v1/chat/completions{key} "
            f"-H 'content-type: application/json' -d {shlex.quote(body)}\nCtrl-C ends the server.",
            file=sys.stderr,
            flush=True,
        )


def _reached(host: str) -> str:
    """Return how this machine reaches a server that listens on a host."""
    usual = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{usual}]" if ":" in usual else usual


def _end_at_once(*_: object) -> None:
    """While it starts there is nothing to lose; KeyboardInterrupt may come where Python ignores what is raised, in the
    end of an object, say, and the server would go on.
    """
    print("retrieval-attn serve: interrupted", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)


def _spec(args: argparse.Namespace) -> EngineSpec:
    from retrieval_attn.server.settings import EngineSpec

    if not args.keep_session >= 0:
        raise ConfigError(f"--keep-session must be at least 0 minutes, got {args.keep_session:g}.")

    loading = {
        "device": args.device,
        "dtype": args.dtype,
        "quantization": None if args.quantization == "none" else args.quantization,
        "yarn": args.yarn,
        "gpu_memory": args.gpu_memory,
        "max_context": None if args.max_context is None else parse_tokens(args.max_context, "--max-context"),
    }
    return EngineSpec(
        model_path(args.model),
        loading,
        config_of(args).to_dict(),
        rows=args.max_num_seqs,
        prefix_cache_bytes=_bytes(args.prefix_cache_memory, "--prefix-cache-memory"),
        prefix_cache_device_bytes=_bytes(args.prefix_cache_gpu_memory, "--prefix-cache-gpu-memory"),
        prefix_cache_disk_bytes=0
        if args.prefix_cache_disk == "0"
        else _bytes(args.prefix_cache_disk, "--prefix-cache-disk"),
        paged_prefix_tokens=tokens_or_zero(args.paged_prefix_tokens, "--paged-prefix-tokens"),
        store=args.store,
        warm_tokens=None if args.warm_up == "auto" else tokens_or_zero(args.warm_up, "--warm-up"),
        cache_generated=not args.no_cache_generated,
        keep_session_seconds=args.keep_session * 60,
        generation_config=args.generation_config,
    )


def _apart(args: argparse.Namespace) -> bool:
    """Whether the engine gets a process of its own: on a GPU, its steps must not wait for the server's Python."""
    if args.engine != "auto":
        return bool(args.engine == "process")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
    if args.device != "cpu" and visible and NVIDIA.exists():
        return True  # without the imports below, which would delay the start of the process
    skip_unused()
    from retrieval_attn.model.loading import choose_device

    return choose_device(args.device).type == "cuda"


def _bytes(value: str | None, name: str) -> int | None:
    return None if value is None else parse_bytes(value, name)


def _name_of(model: str) -> str:
    if Path(model).is_dir():
        return Path(model).resolve().name
    return Path(model).stem if model.endswith(".gguf") else model
