"""RULER (13 synthetic long-context tasks): generators, prompts and scoring, without downloads.

The prompts, parameters and scoring are the benchmark's.  Unlike the original, a context is filled to 99 % or more of
its length, a sample depends on nothing but its task, length, seed and index, and ids are unique.
"""

from retrieval_attn_eval.ruler.suite import RulerSuite

__all__ = ["RulerSuite"]
