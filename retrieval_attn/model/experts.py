"""Experts of a mixture while single tokens are decoded on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedConfig, PreTrainedModel

GROUPED, BATCHED = "grouped_mm", "batched_mm"


@contextmanager
def experts_of_one_token(model: PreTrainedModel, rows: int) -> Iterator[None]:
    """On a GPU, multiply each of `rows` tokens by copies of its experts' weights, as transformers' own `generate` does.

    The grouped product, transformers' choice for any number of tokens, reads the groups' borders on the CPU but for
    bfloat16 on data-centre cards, and then no graph can hold it. It stays where a graph can, for it copies nothing;
    where the rows visit more experts than there are, which copies would make slower than no graph; and where the user
    has chosen another way. The copies take the bytes of the experts that a token visits, per row.
    """
    chosen: dict[str, str | None] = getattr(model, "get_experts_implementation", dict)()
    if GROUPED not in chosen.values() or not _copies(model, rows):
        yield
        return
    model.set_experts_implementation({part: BATCHED if way == GROUPED else way for part, way in chosen.items()})
    try:
        yield
    finally:
        model.set_experts_implementation(chosen)


def _copies(model: PreTrainedModel, rows: int) -> bool:
    """Whether weights are to be copied."""
    device = model.device
    if device.type == "cpu":
        return False
    # as PyTorch chooses between its kernel of groups and one product after the other
    if (
        device.type == "cuda"
        and model.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device)[0] in (9, 10)
    ):
        return False
    visited, experts = expert_counts(model.config.get_text_config(decoder=True))
    return rows == 1 or rows * (visited or 1) <= (experts or visited or 1)


def expert_counts(text: PreTrainedConfig) -> tuple[int | None, int | None]:
    """Experts that a token visits, and experts of a layer, as far as the config tells."""
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    return getattr(text, "num_experts_per_tok", None), experts
