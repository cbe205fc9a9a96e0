"""The paper's tables and figures again: commands that regenerate their shape, and the paper's numbers beside ours."""

from __future__ import annotations

from retrieval_attn_eval.reproduce.experiments import EXPERIMENTS

__all__ = ["EXPERIMENTS"]
