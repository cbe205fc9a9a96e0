"""What a process of a bench writes for the command that made it: events, one JSON line each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tell = Callable[[dict[str, Any]], None]


def told(settings_file: str, events_file: str, work: Callable[[dict[str, Any], Tell], None]) -> int:
    """work(what the first file holds, tell) between a first and a last event; `tell` writes to the second file.

    Returns exit status 0, also where rows failed. Ends the process where the command is gone.
    """
    parent = os.getppid()
    with open(events_file, "a", encoding="utf-8", buffering=1) as events:

        def tell(event: dict[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")
            if os.getppid() != parent:  # killed: nobody reads on, or ends this process
                sys.exit("the command that started this process is gone")

        tell({"begin": "import", "what": "libraries loaded"})
        work(json.loads(Path(settings_file).read_text(encoding="utf-8")), tell)
        tell({"end": True})
    return 0
