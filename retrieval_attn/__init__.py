"""Retrieval attention for long contexts: keys and values in host memory, a small exact part on the device.

Importing this package is instant and imports neither torch nor transformers; names load on first use.
`attn_implementation="retrieval"` is known to transformers as soon as both packages are imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from retrieval_attn._register import register_with_transformers as _register_with_transformers

if TYPE_CHECKING:
    from retrieval_attn.answer import Answer, Sampling, Stats
    from retrieval_attn.cache.cache import RetrievalCache
    from retrieval_attn.config import Config
    from retrieval_attn.context import Context
    from retrieval_attn.engine.generate import generate
    from retrieval_attn.engine.prefill import prefill_by_layer
    from retrieval_attn.engine.switch import disable, enable
    from retrieval_attn.engine.verify import Report, verify
    from retrieval_attn.errors import (
        BackendError,
        CacheMismatchError,
        CaptureError,
        ConfigError,
        ContextLengthError,
        InputDataError,
        MemoryPlanError,
        RetrievalAttentionError,
        RunFolderError,
        ShapeError,
        UnsupportedMaskError,
        UnsupportedModelError,
    )
    from retrieval_attn.llm import LLM
    from retrieval_attn.memory.plan import Plan, plan
    from retrieval_attn.stream import Stream

__version__ = "0.1.0"

_HOME = {
    "Answer": "answer",
    "BackendError": "errors",
    "CacheMismatchError": "errors",
    "CaptureError": "errors",
    "Config": "config",
    "ConfigError": "errors",
    "Context": "context",
    "ContextLengthError": "errors",
    "InputDataError": "errors",
    "LLM": "llm",
    "MemoryPlanError": "errors",
    "Plan": "memory.plan",
    "Report": "engine.verify",
    "RetrievalAttentionError": "errors",
    "RetrievalCache": "cache.cache",
    "RunFolderError": "errors",
    "Sampling": "answer",
    "ShapeError": "errors",
    "Stats": "answer",
    "Stream": "stream",
    "UnsupportedMaskError": "errors",
    "UnsupportedModelError": "errors",
    "disable": "engine.switch",
    "enable": "engine.switch",
    "generate": "engine.generate",
    "plan": "memory.plan",
    "prefill_by_layer": "engine.prefill",
    "verify": "engine.verify",
}

__all__ = [
    "Answer",
    "BackendError",
    "CacheMismatchError",
    "CaptureError",
    "Config",
    "ConfigError",
    "Context",
    "ContextLengthError",
    "InputDataError",
    "LLM",
    "MemoryPlanError",
    "Plan",
    "Report",
    "RetrievalAttentionError",
    "RetrievalCache",
    "RunFolderError",
    "Sampling",
    "ShapeError",
    "Stats",
    "Stream",
    "UnsupportedMaskError",
    "UnsupportedModelError",
    "disable",
    "enable",
    "generate",
    "plan",
    "prefill_by_layer",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


_register_with_transformers()
