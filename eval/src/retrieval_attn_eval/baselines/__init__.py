"""The paper's baselines and this package's own method, behind one name each, on the same hooks.

make_method("snapkv", model, tokenizer, capacity=2048).answers(prompt, ("inside", "after"), 32)
"""

from __future__ import annotations

from retrieval_attn_eval.baselines.registry import (
    METHODS,
    budget_options,
    build_methods,
    check_options,
    make_method,
    option_names,
    parse_method_options,
)
from retrieval_attn_eval.baselines.reply import POSITIONS, Method, Reply

__all__ = [
    "METHODS",
    "POSITIONS",
    "Method",
    "Reply",
    "budget_options",
    "build_methods",
    "check_options",
    "make_method",
    "option_names",
    "parse_method_options",
]
