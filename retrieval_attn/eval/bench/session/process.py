"""One process of a session: made by the command, which reads what it writes, line by line.

python -m retrieval_attn.eval.bench.session.process SETTINGS.json EVENTS.jsonl
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(settings_file: str, events_file: str) -> int:
    """Run all stages; every event is one JSON line of the second file. Exit status 0 also where rows failed."""
    parent = os.getppid()
    with open(events_file, "a", encoding="utf-8", buffering=1) as events:

        def tell(event: dict[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")
            if os.getppid() != parent:  # killed: nobody reads on, or ends this process
                sys.exit("the command that started this process is gone")

        tell({"begin": "import", "what": "libraries loaded"})
        import torch

        from retrieval_attn.eval.bench.session.card import watch
        from retrieval_attn.eval.bench.session.stages import Session
        from retrieval_attn.eval.bench.session.subject import Settings
        from retrieval_attn.model.loading import choose_device

        settings = Settings.from_dict(json.loads(Path(settings_file).read_text(encoding="utf-8")))
        device = choose_device(settings.device)
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None
        card = watch(uuid)
        try:
            if card is not None:
                tell({"facts": {"card_bytes_before": card.before}})
            Session(settings, card, tell).run()
        finally:
            if card is not None:
                card.close()
        tell({"end": True})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
