"""InfiniteBench: tasks from the benchmark's files or generated, prompts of five projects, scoring.

Importing it loads neither torch nor transformers.
"""

from __future__ import annotations

from retrieval_attn_eval.infinitebench.suite import InfiniteBench

__all__ = ["InfiniteBench"]
