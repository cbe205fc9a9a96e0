"""Chat templates: messages as text, within a time limit, and text cut at a stand-in."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from retrieval_attn.errors import InputDataError

T = TypeVar("T")

RENDER_SECONDS = 10.0
"""For all renderings of one prompt."""
DELIVERY_SECONDS = 0.05
"""An exception that another thread raised arrives within this time."""

_limited = threading.local()
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


class _Expired(BaseException):
    """Not an Exception, so that Jinja does not handle it."""


def within_limit(work: Callable[[], T]) -> T:
    """Run `work`, which renders chat templates, and stop it after `RENDER_SECONDS`.

    A timer's thread raises an exception in this one, so that loops without any output end, too; an operation that is a
    single call of C runs to its end first. Inside another `within_limit`, that one's limit holds.
    Raises InputDataError.
    """
    if getattr(_limited, "now", False):
        return work()
    thread, lock, seconds = ctypes.c_ulong(threading.get_ident()), threading.Lock(), RENDER_SECONDS
    running, expired = True, False

    def stop() -> None:
        nonlocal expired
        with lock:
            if running:
                expired = True
                _raise_in(thread, ctypes.py_object(_Expired))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    _limited.now = True
    try:
        try:
            timer.start()
            return work()
        finally:
            with lock:
                running = False
            timer.cancel()
            if expired and not isinstance(sys.exception(), _Expired):
                # It is raised here at the latest. Taking it back instead would leave the interpreter's flag for pending
                # exceptions set for good: all later bytecode would be slower, and a traced function would never start.
                time.sleep(DELIVERY_SECONDS)
    except _Expired:
        raise InputDataError(
            f"The model's chat template took more than {seconds:g} s for one prompt. Correct tokenizer.chat_template, "
            "or send fewer messages and tools."
        ) from None
    finally:
        _limited.now = False


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    *,
    answering: bool = True,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Render messages, and tools, by the tokenizer's chat template.

    answering: end where an answer starts. options: variables of the template. Raises InputDataError for messages that
    it does not take, or a template that takes too long.
    """
    apply: Callable[..., Any] = tokenizer.apply_chat_template

    def work() -> str:
        given = dict(options or {})
        return str(apply(list(messages), tools=tools, tokenize=False, add_generation_prompt=answering, **given))

    try:
        return within_limit(work)
    except InputDataError:
        raise
    except Exception as error:  # a template's author may raise any
        raise InputDataError(
            f"The model's chat template does not take these {len(messages)} messages ({type(error).__name__}: "
            f"{error}); most want user and assistant in turn, after at most one system message. Correct "
            "tokenizer.chat_template, or set it to None to ask without one."
        ) from error


def cut_at(text: str, word: str) -> tuple[str, str]:
    """Return the rendered text before and after a stand-in. Raises InputDataError unless it occurs exactly once."""
    before, found, behind = text.partition(word)
    if not found or word in behind:
        raise InputDataError(
            "The tokenizer's chat template must write out what the user says, exactly once; it turned a message into "
            f"{shown(text)}. Correct tokenizer.chat_template, or set it to None to ask without one."
        )
    return before, behind


def shown(value: Any) -> str:
    """Return at most 80 characters of a value's `repr`."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
