"""The internals that evaluation code may use: attention layers, index kinds, the decode step, memory readings.

Everything else that the distribution retrieval-attn-eval needs is public API. Names are loaded when they are first
used: importing this module loads neither torch nor numba. No stability is promised for any of them.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrieval_attn.attention.layer import AttentionRecord as AttentionRecord
    from retrieval_attn.attention.layer import CacheLayer as CacheLayer
    from retrieval_attn.attention.retrieval import RetrievalLayer as RetrievalLayer
    from retrieval_attn.attention.sequence import Batch as Batch
    from retrieval_attn.attention.sequence import stacked as stacked
    from retrieval_attn.attention.sequence import unstacked as unstacked
    from retrieval_attn.cli.output import Spinner as Spinner
    from retrieval_attn.compile.progress import ProgressBar as ProgressBar
    from retrieval_attn.cpu.attend import attend_range_heads as attend_range_heads
    from retrieval_attn.cpu.attend import merge_partials as merge_partials
    from retrieval_attn.engine.engine import default_limits as default_limits
    from retrieval_attn.gpu.attention.flash import attend as attend
    from retrieval_attn.gpu.attention.merge import Partial as Partial
    from retrieval_attn.gpu.attention.merge import merge as merge
    from retrieval_attn.gpu.attention.merge import sink_logit_partial as sink_logit_partial
    from retrieval_attn.gpu.expert_blocks import BlockLayout as BlockLayout
    from retrieval_attn.gpu.expert_blocks import PlacedExperts as PlacedExperts
    from retrieval_attn.gpu.memory import cap as cap
    from retrieval_attn.gpu.memory import expand_segments as expand_segments
    from retrieval_attn.gpu.memory import spare_bytes as spare_bytes
    from retrieval_attn.gpu.packed import PackedWeights as PackedWeights
    from retrieval_attn.gpu.packed_experts import ExpertShape as ExpertShape
    from retrieval_attn.gpu.packed_experts import PackedExperts as PackedExperts
    from retrieval_attn.gpu.packed_experts import packed_shapes as packed_shapes
    from retrieval_attn.index.base import MAX_KEYS as MAX_KEYS
    from retrieval_attn.index.base import HeadShape as HeadShape
    from retrieval_attn.index.base import HeldMemory as HeldMemory
    from retrieval_attn.index.base import HostBytes as HostBytes
    from retrieval_attn.index.base import IndexMemory as IndexMemory
    from retrieval_attn.index.base import KeyIndex as KeyIndex
    from retrieval_attn.index.base import StateValue as StateValue
    from retrieval_attn.index.base import Training as Training
    from retrieval_attn.index.base import train_positions as train_positions
    from retrieval_attn.index.formats import Format as Format
    from retrieval_attn.index.formats import from_float32 as from_float32
    from retrieval_attn.index.formats import to_float32 as to_float32
    from retrieval_attn.index.kernels.codes import encode_keys as encode_keys
    from retrieval_attn.index.kernels.knn import training_lists as training_lists
    from retrieval_attn.index.keys import StoredKeys as StoredKeys
    from retrieval_attn.index.memory import aligned_empty as aligned_empty
    from retrieval_attn.index.spec import IndexSpec as IndexSpec
    from retrieval_attn.index.spec import register as register
    from retrieval_attn.index.task.scans import called_search as called_search
    from retrieval_attn.index.task.search import CompiledSearch as CompiledSearch
    from retrieval_attn.index.task.search import SearchRequest as SearchRequest
    from retrieval_attn.index.threads import check_threads as check_threads
    from retrieval_attn.index.threads import kernel_threads as kernel_threads
    from retrieval_attn.memory.device_room import IndexChoice as IndexChoice
    from retrieval_attn.memory.host_room import available_host_bytes as available_host_bytes
    from retrieval_attn.model.checkpoint import heads_config as heads_config
    from retrieval_attn.model.expert_loading import FLOAT_GROUP as FLOAT_GROUP
    from retrieval_attn.model.experts import GROUP as GROUP
    from retrieval_attn.model.experts import ExpertWeights as ExpertWeights
    from retrieval_attn.model.experts import expert_parameters as expert_parameters
    from retrieval_attn.model.experts import matrix_shape as matrix_shape
    from retrieval_attn.model.experts import quantized_experts as quantized_experts
    from retrieval_attn.model.experts import use_packed_experts as use_packed_experts
    from retrieval_attn.model.hooks import MaskSpec as MaskSpec
    from retrieval_attn.model.placed_experts import empty_blocks as empty_blocks
    from retrieval_attn.model.rotation import Rotation as Rotation
    from retrieval_attn.offload.queries import SPAN as SPAN
    from retrieval_attn.offload.staging import to_device as to_device
    from retrieval_attn.offload.staging import to_queries as to_queries
    from retrieval_attn.remote import Endpoint as Endpoint
    from retrieval_attn.remote import RemoteError as RemoteError
    from retrieval_attn.remote import Usage as Usage
    from retrieval_attn.remote import http_client as http_client
    from retrieval_attn.remote import model_names as model_names
    from retrieval_attn.remote import read_delta as read_delta
    from retrieval_attn.remote import read_usage as read_usage
    from retrieval_attn.remote import refusal as refusal
    from retrieval_attn.runner.attention import using_retrieval as using_retrieval
    from retrieval_attn.runner.decode import DecodeSteps as DecodeSteps
    from retrieval_attn.runner.decode import PromptState as PromptState
    from retrieval_attn.runner.decode import TokenChoice as TokenChoice
    from retrieval_attn.runner.decode import forward as forward
    from retrieval_attn.runner.decode import run as run
    from retrieval_attn.runner.prefill import finish_prefill as finish_prefill
    from retrieval_attn.store import ContextStore as ContextStore
    from retrieval_attn.store.mapped import give_up as give_up
    from retrieval_attn.store.mapped import resident_bytes as resident_bytes


def _imported() -> dict[str, str]:
    """Return the module of each name imported above: type checkers read these imports, Python does not run them."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname}


_MODULES = _imported()


def __getattr__(name: str) -> Any:
    """Load an exported name from its module. Raises AttributeError for any other name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(sorted(_MODULES))}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Exported names, sorted."""
    return sorted(_MODULES)
