"""verify(model): does retrieval attention with retrieve="all" reproduce the model's eager attention exactly?"""

from __future__ import annotations

from transformers import PreTrainedModel

from retrieval_attn.attention.cache import unchecked_cache
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.runner.compare import Report, compare
from retrieval_attn.runner.support import mark_verified


def verify(model: PreTrainedModel, tokens: int = 64, decode_steps: int = 2) -> Report:
    """Compare eager full attention with retrieval over all keys on `tokens` random tokens; see `compare`.

    A model that passes is not verified again when a cache is made for it.
    """
    model = unwrapped(model)
    report = compare(model, unchecked_cache, tokens, decode_steps)
    mark_verified(model, report)
    return report
