"""`python -m retrieval_attn.compile.worker`: does the jobs that come as lines of JSON, answers each with a line.

It ends when its standard input does, so that it never outlives who started it for longer than one job.
"""

from __future__ import annotations

import json
import sys

from retrieval_attn.compile.jobs import CompileJob


def main() -> None:
    """Do job after job. A job that fails is answered with the reason."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    for line in sys.stdin:
        target, *arguments = json.loads(line)
        job = CompileJob(target, tuple(arguments))
        try:
            job.run()
            job.mark.touch()
            answer = "done"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
