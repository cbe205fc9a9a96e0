"""Experts of a mixture while single tokens are decoded on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

GROUPED, BATCHED = "grouped_mm", "batched_mm"


@contextmanager
def experts_of_one_token(model: PreTrainedModel) -> Iterator[None]:
    """On a GPU, multiply each token by copies of its experts' weights, which transformers' own `generate` does, too.

    The grouped product, transformers' choice for any number of tokens, reads the groups' borders on the CPU but for
    bfloat16 on data-centre cards, and then no graph can hold it. Other ways that the user has chosen stay. The copies
    take the bytes of the experts that a token visits, per row.
    """
    chosen: dict[str, str | None] = getattr(model, "get_experts_implementation", dict)()
    if model.device.type == "cpu" or GROUPED not in chosen.values():
        yield
        return
    model.set_experts_implementation({part: BATCHED if way == GROUPED else way for part, way in chosen.items()})
    try:
        yield
    finally:
        model.set_experts_implementation(chosen)
