"""A model's rotary embedding as one kernel, while a step of one token is recorded.

transformers' model files have a function `apply_rotary_pos_emb`. It is taken if for numbers of the shapes that come it
gives what `gpu/rotary.py` gives, bit by bit; pairs that lie side by side (GLM, Cohere) and other signatures stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.gpu.rotary import rotate
from retrieval_attn.model.layers import modules_of
from retrieval_attn.model.rotation import APPLY


@contextmanager
def fused_rotary(model: PreTrainedModel) -> Iterator[None]:
    """The functions of the files that the model's modules come from are fused within. Outside they are as they were.

    Another model of such a file, in another thread, gets the same numbers.
    """
    names = {type(module).__module__ for module in modules_of(model)}
    with ExitStack() as stack:
        for file in filter(None, map(sys.modules.get, sorted(names))):
            original = file.__dict__.get(APPLY)
            if callable(original) and not isinstance(original, _Fused):
                stack.callback(_put_back, file, original)
                setattr(file, APPLY, _Fused(original))
        yield


def _put_back(file: ModuleType, original: Callable[..., Any]) -> None:
    setattr(file, APPLY, original)


class _Fused:
    """`apply_rotary_pos_emb` of one file."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original, self._same = original, dict[Any, bool]()

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            turned = rotate(q, k, cos, sin)
            if turned is not None:
                kind = tuple((one.shape, one.stride(), one.dtype, one.device) for one in (q, k, cos, sin))
                if kind not in self._same:  # in a trial, before anything is captured
                    right = self._original(q, k, cos, sin)
                    self._same[kind] = all(torch.equal(own, other) for own, other in zip(turned, right, strict=True))
                if self._same[kind]:
                    return turned
        return self._original(q, k, cos, sin, *args, **kwargs)
