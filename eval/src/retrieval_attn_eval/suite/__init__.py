"""Task suites: what a benchmark's sample is, running it over methods, and what the results say.

Importing it loads neither torch nor transformers.
"""

from __future__ import annotations

from retrieval_attn_eval.suite.sample import Row
from retrieval_attn_eval.suite.suite import TaskSuite

__all__ = ["Row", "TaskSuite"]
