"""StreamingLLM: attention sinks and a sliding window, everything between them is never seen again.

Follows "Efficient Streaming Language Models with Attention Sinks", section 3.2.  Tokens keep their positions in the
text; the paper counts positions inside its cache, which differs only beyond the trained length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retrieval_attn.testing import Partial, attend
from retrieval_attn_eval.baselines.policy import Policy

_ROWS = 512
"""Queries per block while the context is read through the window."""


class Streaming(Policy):
    """Query t sees tokens below `sink` and the last `window` tokens up to t."""

    one_by_one = False

    def attend(self, query: Tensor, position: int, row: int, scale: float) -> Partial:
        sink, window = self.options.sink, self.options.window
        key, value = self.tokens.key, self.tokens.value
        parts = []
        for first in range(0, query.shape[2], _ROWS):
            rows = query[:, :, first : first + _ROWS]
            start, stop = position + first, position + first + rows.shape[2]
            low = max(0, start - window + 1)
            sinks = torch.arange(min(sink, low), device=query.device)
            seen = torch.cat([sinks, torch.arange(low, stop, device=query.device)])
            mask = None
            if rows.shape[2] > 1:
                at = torch.arange(start, stop, device=query.device)[:, None]
                mask = ((seen <= at) & ((seen > at - window) | (seen < sink)))[None, None]
                self.meter.add(rows.shape[2], float(mask.sum()) / rows.shape[2])
            else:
                self.meter.add(1, len(seen))
            parts.append(attend(rows, key[:, :, seen], value[:, :, seen], scale=scale, mask=mask))
        return Partial(torch.cat([part.out for part in parts], dim=2), torch.cat([part.lse for part in parts], dim=2))
