"""One process of a session: made by the command, which reads what it writes, line by line.

python -m retrieval_attn_eval.bench.session.process SETTINGS.json EVENTS.jsonl
"""

from __future__ import annotations

import sys
from typing import Any

from retrieval_attn_eval.bench.session.events import Tell, told


def main(settings_file: str, events_file: str) -> int:
    """Run all stages, as `told` says."""
    return told(settings_file, events_file, _work)


def _work(settings_fields: dict[str, Any], tell: Tell) -> None:
    if "kind" in settings_fields:
        from retrieval_attn_eval.bench.session.saving import Job
        from retrieval_attn_eval.bench.session.saving_stages import Opening, Saving

        job = Job.from_dict(settings_fields)
        (Saving if job.kind == "save" else Opening)(job, tell).run()
        return
    import torch

    from retrieval_attn.model.loading import choose_device
    from retrieval_attn_eval.bench.session.card import watch
    from retrieval_attn_eval.bench.session.stages import Session
    from retrieval_attn_eval.bench.session.subject import Settings

    settings = Settings.from_dict(settings_fields)
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
