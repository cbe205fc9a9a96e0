"""One process of `bench contexts`: made by the command, which reads what it writes, line by line.

python -m retrieval_attn_eval.bench.contexts.process JOB.json EVENTS.jsonl
"""

from __future__ import annotations

import sys
from typing import Any

from retrieval_attn_eval.bench.session.events import Tell, told


def main(job_file: str, events_file: str) -> int:
    """Do the job, as `told` says."""
    return told(job_file, events_file, _work)


def _work(job_fields: dict[str, Any], tell: Tell) -> None:
    from retrieval_attn_eval.bench.contexts.job import Job
    from retrieval_attn_eval.bench.contexts.stages import Opening, Saving

    job = Job.from_dict(job_fields)
    (Saving if job.kind == "save" else Opening)(job, tell).run()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
