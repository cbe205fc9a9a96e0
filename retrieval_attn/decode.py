"""The token loop: one forward for what is new, then one forward per generated token.

Shared by `retrieval_attn.generate` (inside transformers' generate) and `Context`. It feeds positions
explicitly, so that padded rows and rows whose padding lies in the middle continue where they stopped.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from retrieval_attn.cache import RetrievalCache
from retrieval_attn.placement import agreed


@dataclass
class Generated:
    """What a token loop produced.

    sequences: (batch, prompt + new) ids; rows that stopped early are filled with the pad id.
    """

    sequences: Tensor
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


def positions(valid: Tensor) -> Tensor:
    """Position of every column of a (batch, columns) mask: real tokens count 0, 1, ...; padding gets 1.

    transformers gives padded columns position 1; nothing attends to them.
    """
    counted = valid.long().cumsum(dim=1) - 1
    return counted.masked_fill(~valid.bool(), 1)


def forward(
    model: PreTrainedModel,
    cache: RetrievalCache,
    ids: Tensor | None,
    *,
    mask: Tensor | None,
    position_ids: Tensor,
    inputs_embeds: Tensor | None = None,
) -> Tensor:
    """Run `model` on new tokens and return the last column's logits, (batch, vocabulary) float32.

    mask: (batch, all columns) bool or None without padding; position_ids: (batch, new).
    """
    arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "attention_mask": mask}
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters:
        arguments["position_ids"] = position_ids
    if "logits_to_keep" in parameters:
        arguments["logits_to_keep"] = 1
    if inputs_embeds is not None:
        arguments["inputs_embeds"] = inputs_embeds
    else:
        arguments["input_ids"] = ids
    logits: Tensor = model(**arguments, return_dict=True).logits
    return logits[:, -1].float()


@torch.no_grad()
def run(
    model: PreTrainedModel,
    cache: RetrievalCache,
    sequences: Tensor,
    logits: Tensor,
    *,
    mask: Tensor | None,
    position: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    do_sample: bool,
    pad_id: int,
    on_token: Callable[[list[int]], None] | None = None,
    generator: torch.Generator | None = None,
    keep_scores: bool = False,
    keep_logits: bool = False,
) -> Generated:
    """Generate until every row meets a criterion.

    sequences: (batch, columns) ids so far (what processors and criteria see). logits: (batch, vocabulary) of
    the next token. mask: (batch, cached columns) bool or None. position: (batch,) of the last real token.
    on_token gets the new id of every row, pad for rows that stopped. The last token is not fed back: the
    cache then holds one column less than `sequences`, as transformers leaves it.
    """
    started = time.perf_counter()
    batch = sequences.shape[0]
    running = torch.ones(batch, dtype=torch.bool, device=sequences.device)
    result = Generated(sequences, 0, 0.0, 0.0)
    while True:
        scores: Tensor = processors(sequences, logits)  # type: ignore[arg-type]  # declared LongTensor, FloatTensor
        if keep_scores:
            result.scores.append(scores)
        if keep_logits:
            result.logits.append(logits)
        if do_sample:
            probabilities = torch.softmax(scores, dim=-1)
            chosen = agreed(torch.multinomial(probabilities, 1, generator=generator).squeeze(1), model)
        else:
            chosen = scores.argmax(dim=-1)
        chosen = torch.where(running, chosen, pad_id)
        sequences = torch.cat([sequences, chosen[:, None]], dim=1)
        result.new_tokens += 1
        if on_token is not None:
            on_token(chosen.tolist())
        running = running & ~criteria(sequences, None)
        if not bool(running.any()):
            break
        position = position + 1
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(batch, 1)], dim=1)
        logits = forward(model, cache, chosen[:, None], mask=mask, position_ids=position[:, None])
    result.sequences = sequences
    result.decode_seconds = time.perf_counter() - started
    return result
