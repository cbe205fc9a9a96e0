"""JSON from files of others: what Python cannot hold or write again is an error at once, not later."""

from __future__ import annotations

import json
from typing import Any


def parsed(text: str | bytes) -> Any:
    """`json.loads`. Raises ValueError also for nesting too deep for Python and for strings that are no Unicode."""
    try:
        tree = json.loads(text)
        if (b"\\u" if isinstance(text, bytes) else "\\u") in text:  # type: ignore[operator]  # both of one kind
            json.dumps(tree, ensure_ascii=False).encode()  # a lone surrogate; UnicodeEncodeError is a ValueError
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return tree
