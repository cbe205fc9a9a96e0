"""HostSource: attention of queries to their best keys on the host, or to all of them (`cpu/host_attend.py`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from retrieval_attn.attention.sequence import stacked
from retrieval_attn.attention.source import AttentionRequest, AttentionSource, RangeResult, SourceResult, TokenRange
from retrieval_attn.config import Config
from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.host_attend import attend_paths
from retrieval_attn.cpu.step.plan import total_cost
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.gpu.attention.merge import Partial
from retrieval_attn.offload.staging import to_queries


def shares_keys(config: Config, host: SequenceKV) -> bool:
    """Return whether heads may get their own numbers of keys: an index on the host searches them."""
    return config.shares_keys and not host.spec.keeps_codes(host.head_dim)


def retrieved_keys(config: Config, host: SequenceKV, num_keys: int) -> int | HeadBudgets | None:
    """Keys to retrieve out of `num_keys` of a path, which may be a number for each head; None means all of them."""
    if config.shares_keys and host.budgets is not None:
        return host.budgets
    return config.retrieve_count(num_keys)


class HostSource(AttentionSource[TokenRange]):
    """Tokens on the host, searched by the indexes there. Rows that share a sequence ask it together."""

    retrieves = batched = capturable = True

    @classmethod
    def covers(cls, request: AttentionRequest, tokens: TokenRange) -> TokenRange | None:
        return None if request.exact else tokens

    def finish(self) -> SourceResult:
        """Attend to all sequences in one step for each number of keys per query."""
        self._query = torch.from_numpy(to_queries(self.query))
        groups: dict[int | HeadBudgets | None, list[TokenRange]] = {}
        for one in self.ranges:
            every = self.request.held.batch.attends_to_all
            k = None if every else retrieved_keys(self.request.config, one.host, one.stop - one.start)
            groups.setdefault(k, []).append(one)
        found, costs = [], []
        for k, ranges in groups.items():
            answers = attend_paths(
                [one.host for one in ranges],
                [self._host_queries(one) for one in ranges],
                [(one.start, one.stop) for one in ranges],
                k,
                scale=self.scoring.scale,
                softcap=self.scoring.softcap,
            )
            for one, answer in zip(ranges, answers, strict=True):
                partial = Partial(torch.from_numpy(answer.out), torch.from_numpy(answer.lse))
                found.append(RangeResult(one, partial, None if answer.rest is None else torch.from_numpy(answer.rest)))
                costs.append(answer.cost)
        cost = costs[0] if len(costs) == 1 else total_cost(costs)
        return self.assembled(found, self.ranges[0].host.value_dim, cost)

    def _host_queries(self, one: TokenRange) -> npt.NDArray[np.float32]:
        """Return the queries of the rows of a range: (q_heads, rows * new, head_dim) float32."""
        queries: npt.NDArray[np.float32] = stacked(self._query, one.rows).contiguous().numpy()
        return queries
