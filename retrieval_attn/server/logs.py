"""Logs as lines of JSON, with the request that each belongs to. No text of a request or an answer is logged."""

from __future__ import annotations

import contextvars
import json
import logging
import time
from typing import Any

from transformers.utils import logging as transformers_logging

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""Of the request that is being answered, "" outside of one."""

LEVELS = {
    "": logging.WARNING,
    "retrieval_attn": logging.INFO,
    "uvicorn.error": logging.WARNING,
    "transformers": logging.WARNING,
}


class JsonLines(logging.Formatter):
    """One line per record: time (UTC), level, logger, message, request_id, and fields of `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_as_json() -> None:
    """Let all that the server runs write lines of JSON to the error output, and nothing else: no bars either."""
    transformers_logging.disable_progress_bar()
    transformers_logging.get_verbosity()  # it adds a handler of its own when it is first asked
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name, level in LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
