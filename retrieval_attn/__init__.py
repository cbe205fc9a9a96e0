"""Retrieval attention for long contexts: keys and values in host memory, a small exact part on the device.

Importing this package is instant and imports neither torch nor transformers; names load on first use.
`attn_implementation="retrieval"` is known to transformers as soon as both packages are imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from retrieval_attn._register import register_with_transformers as _register_with_transformers
from retrieval_attn.imports import quiet as _quiet

if TYPE_CHECKING:
    from retrieval_attn.answer import Answer, Stats, Stream
    from retrieval_attn.attention.cache import RetrievalCache
    from retrieval_attn.config import Config
    from retrieval_attn.context import Context
    from retrieval_attn.engine.engine import Engine
    from retrieval_attn.engine.request import Event, Finished, Request
    from retrieval_attn.errors import (
        AdmissionError,
        BackendError,
        CacheMismatchError,
        CaptureError,
        ConfigError,
        ContextLengthError,
        EngineFullError,
        InputDataError,
        MemoryPlanError,
        NotFiniteError,
        RetrievalAttentionError,
        ShapeError,
        StoreDamagedError,
        StoreError,
        StoreMismatchError,
        UnknownContextError,
        UnsupportedModelError,
    )
    from retrieval_attn.llm import LLM
    from retrieval_attn.memory.plan import Plan, plan
    from retrieval_attn.runner.generate import generate
    from retrieval_attn.runner.prefill import prefill_by_layer
    from retrieval_attn.runner.switch import Report, disable, enable, verify
    from retrieval_attn.sampling.grammar import GrammarSpec
    from retrieval_attn.sampling.sampling_params import Sampling, SamplingParams

__version__ = "0.1.0"

_NAMES = {
    "answer": ("Answer", "Stats", "Stream"),
    "sampling.grammar": ("GrammarSpec",),
    "sampling.sampling_params": ("Sampling", "SamplingParams"),
    "engine.engine": ("Engine",),
    "engine.request": ("Event", "Finished", "Request"),
    "attention.cache": ("RetrievalCache",),
    "config": ("Config",),
    "context": ("Context",),
    "runner.generate": ("generate",),
    "runner.prefill": ("prefill_by_layer",),
    "runner.switch": ("Report", "disable", "enable", "verify"),
    "llm": ("LLM",),
    "memory.plan": ("Plan", "plan"),
}
"""Public names by the module that they are loaded from; all others are errors."""

__all__ = [
    "AdmissionError",
    "Answer",
    "BackendError",
    "CacheMismatchError",
    "CaptureError",
    "Config",
    "ConfigError",
    "Context",
    "ContextLengthError",
    "Engine",
    "EngineFullError",
    "Event",
    "Finished",
    "GrammarSpec",
    "InputDataError",
    "LLM",
    "MemoryPlanError",
    "NotFiniteError",
    "Plan",
    "Report",
    "Request",
    "RetrievalAttentionError",
    "RetrievalCache",
    "Sampling",
    "SamplingParams",
    "ShapeError",
    "Stats",
    "StoreDamagedError",
    "StoreError",
    "StoreMismatchError",
    "Stream",
    "UnknownContextError",
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
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _quiet()  # most names import transformers
    home = next((module for module, names in _NAMES.items() if name in names), "errors")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


_register_with_transformers()
