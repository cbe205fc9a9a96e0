"""One process of `bench contexts`: made by the command, which reads what it writes, line by line.

python -m retrieval_attn.eval.bench.contexts.process JOB.json EVENTS.jsonl
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(job_file: str, events_file: str) -> int:
    """Do the job; every event is one JSON line of the second file. Exit status 0 also where rows failed."""
    parent = os.getppid()
    with open(events_file, "a", encoding="utf-8", buffering=1) as events:

        def tell(event: dict[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")
            if os.getppid() != parent:  # killed: nobody reads on, or ends this process
                sys.exit("the command that started this process is gone")

        tell({"begin": "import", "what": "libraries loaded"})
        from retrieval_attn.eval.bench.contexts.job import Job
        from retrieval_attn.eval.bench.contexts.stages import Opening, Saving

        job = Job.from_dict(json.loads(Path(job_file).read_text(encoding="utf-8")))
        (Saving if job.kind == "save" else Opening)(job, tell).run()
        tell({"end": True})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
