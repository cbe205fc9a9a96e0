"""Attention to the keys of a layer that were not named to the host, estimated by clusters: one more part of the merge.

A scan of the codes (`gpu/codes/search.py`) has scored all keys. Of those that it did not name, the exponentials are
summed per cluster, and a cluster's mean value stands for the values of its keys:

    W_c = sum of exp(scale * q . k) over its keys;   out = sum W_c mean_value_c / sum W_c;   lse = log sum W_c

What codes lack of q . k is spread about 0, so that the mean of the exponential is larger by half its variance, of its
logarithm. Three kernels (`mass_triton.py`), which a step records: they run while the device would wait for the host.
Masses are sums of one float16 number per key, rounded to 2^-11 of itself, added in float32 and in one order. Of very
many keys a sample is summed and scaled (`is_sampled`): the mass is then spread over enough keys that the sum of one of
eight is off by little, and the time of a step does not grow with the text.

Where Triton does not run, plain PyTorch does the same from the codes: what the kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.attention.merge import Scoring
from retrieval_attn.gpu.clusters.cluster import MAX_CLUSTERS
from retrieval_attn.gpu.codes.codes import ROWS_AT_ONCE, DeviceCodes, code_scores, estimated, lacking
from retrieval_attn.gpu.codes.search import CodeSearch, CodeShape, QueryGroup, QuestionSearch, SearchScratch
from retrieval_attn.gpu.codes.table import BoundEntries, SharedTables, new_table
from retrieval_attn.gpu.decode.kernels import kernels_for

TABLE_WORDS = 2
"""Words of a row of the table: address of the members, address of the mean values; 0: no clusters."""
MIN_CLUSTERS = 16
MEAN_DTYPE = torch.bfloat16
"""Of mean values on a device: half the bytes, and rounded less than the mean is off."""
PROGRAMS = 1056
"""Programs that sum exponentials, of all heads together: eight for each multiprocessor of an H100."""
GROUP = 8
"""Queries of a head that a program serves at most."""
SAMPLED = 1 << 14
"""Keys of a head that are summed at least, where it has more: up to twice as many, nearly all of which those are at
64K, 128K and so on. An eighth of 16K, 2,000 keys, left KL as it was and heads' errors at .0427 in place of .0411."""
RUN = 16
"""Neighbours that are summed together: their scores fill a sector of memory."""


class ClusterEntry(NamedTuple):
    """Clusters of a head's keys: members (at least as many as there are codes,) uint8, the cluster of each key; mean
    values (clusters, value_dim) of a floating dtype, contiguous, finite also where a cluster is empty.
    """

    members: Tensor
    mean_values: Tensor


class TailPartial(NamedTuple):
    """Attention to what was not named: out (queries, value_dim) and lse (queries,), float32; nothing: 0 and -inf."""

    out: Tensor
    lse: Tensor


class ClusterMass(BoundEntries[ClusterEntry]):
    """The estimate of one layer: `bind` says which clusters, `run` is recorded, or called outside a capture."""

    def __init__(
        self,
        entries: int,
        clusters: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        waits: bool = True,
        tables: SharedTables | None = None,
    ) -> None:
        """entries: key-value heads of all rows. clusters: a power of 2, 16 to 256. dtype: of the mean values. waits:
        `bind` waits for the device, which otherwise must be done with the estimate before the next `bind`. tables: as
        in `CodeSearch`; nothing waits then.

        Raises BackendError for other numbers of clusters.
        """
        if clusters & (clusters - 1) or not MIN_CLUSTERS <= clusters <= MAX_CLUSTERS:
            raise BackendError(
                f"clusters={clusters} must be a power of 2 from {MIN_CLUSTERS} to {MAX_CLUSTERS}, the sizes that "
                "the kernels support"
            )
        super().__init__(entries)
        self.clusters, self.value_dim, self.dtype = clusters, value_dim, dtype
        self.table, self._writer = new_table(entries, TABLE_WORDS, device, tables, waits=waits)

    def bind(self, entries: Sequence[ClusterEntry | None], first: int = 0) -> None:
        """Clusters of key-value head h of row b, at b * kv_heads + h; None: there is no estimate for its queries.

        first: as in `CodeSearch.bind`. Raises BackendError for clusters of another shape.
        """
        for entry in entries:
            if entry is not None and (
                entry.mean_values.shape != (self.clusters, self.value_dim)
                or entry.mean_values.dtype != self.dtype
                or entry.members.dtype != torch.uint8
                or not (entry.members.is_contiguous() and entry.mean_values.is_contiguous())
            ):
                raise BackendError(
                    f"a head's clusters need contiguous members in uint8 and mean values ({self.clusters}, "
                    f"{self.value_dim}) in {self.dtype}, got {entry.members.dtype} and "
                    f"{tuple(entry.mean_values.shape)} in {entry.mean_values.dtype}"
                )
        rows = [
            [0, 0] if entry is None else [entry.members.data_ptr(), entry.mean_values.data_ptr()] for entry in entries
        ]
        self._writer.write(rows, first)
        self.entries[first : first + len(entries)] = entries

    def room(self, queries: int) -> TailPartial:
        """Memory for the estimates of `queries` queries, any contents."""
        out = torch.empty(queries, self.value_dim, dtype=torch.float32, device=self.table.device)
        return TailPartial(out, torch.empty(queries, dtype=torch.float32, device=self.table.device))

    def run(
        self,
        search: CodeSearch,
        query: Tensor,
        ids: Tensor,
        places: Tensor | None,
        scratch: SearchScratch,
        scoring: Scoring,
        opaque: Callable[..., None],
    ) -> TailPartial:
        """Estimate query (batch, q_heads, 1, head_dim), row b * q_heads + h being query head h of row b.

        After `search.run` with the same query, ids, places and scratch, in which no other search may have been since.
        Raises BackendError where scratch has no room for all queries at once: `after` is for those.
        """
        batch, q_heads = query.shape[:2]
        into = self.room(batch * q_heads)
        if kernels_for(query, "clusters.mass_triton") is None or not scratch.suits_kernels:
            opaque(self.run_plainly, search, query, ids, places, scoring, into)
            return into
        turns = list(scratch.turns(batch * search.kv_heads, q_heads // search.kv_heads))
        if len(turns) != 1:
            raise BackendError(
                f"the scores of {batch * q_heads} queries are needed, but scratch memory holds {scratch.queries}; "
                "estimate each turn in `after`"
            )
        self.after(search, query, scoring, into)(scratch, turns[0])
        return into

    def after(
        self, search: CodeSearch, query: Tensor, scoring: Scoring, into: TailPartial
    ) -> Callable[[SearchScratch, QueryGroup], None]:
        """Return a function for `search.run` to call after each turn, which writes estimates to `into`.

        Where it names keys plainly it calls nothing: `run_plainly` is for that.
        """

        def estimate(scratch: SearchScratch, turn: QueryGroup) -> None:
            kernels = kernels_for(self.table, "clusters.mass_triton")
            kernels.estimate(self, search, query, scoring, scratch, turn, into)

        return estimate

    def run_plainly(
        self, search: CodeSearch, query: Tensor, ids: Tensor, places: Tensor | None, scoring: Scoring, into: TailPartial
    ) -> None:
        """The same in plain PyTorch, of queries whose keys were named in `ids`."""
        group, dim = query.shape[1] // search.kv_heads, query.shape[3]
        into.out.zero_()
        into.lse.fill_(-torch.inf)
        named = ids.to(query.device)  # they may be named in the host's memory
        named = named if places is None else named[places]
        flat = query.reshape(-1, group, dim).float()
        for number, (codes, clusters) in enumerate(zip(search.entries, self.entries, strict=True)):
            if codes is None or clusters is None or not codes[1]:
                continue
            here = slice(number * group, (number + 1) * group)
            logits = _logits(codes, flat[number], named[here], scoring, search.shape)
            top = logits.amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
            summed, every = is_sampled(codes[1], logits.device)
            weights = torch.where(summed & (logits > -torch.inf), torch.exp(logits - top), 0) * every
            chosen = clusters.members[: codes[1]].long().expand(group, -1)
            masses = weights.new_zeros(group, self.clusters).scatter_add_(1, chosen, weights)
            total = masses.sum(dim=1, keepdim=True)
            into.out[here] = masses / torch.where(total > 0, total, 1) @ clusters.mean_values.float()
            into.lse[here] = (top + torch.log(total))[:, 0]


def mass_grid(entries: int, members: int, *, step: bool = True) -> tuple[int, int, int]:
    """How `members` queries of each of `entries` heads are shared out: queries that a program serves, programs side by
    side for a head's queries, and programs that share a head's keys, at most.

    step: they are those of a step, whose number is always the same; one kernel serves any number of a question's.
    """
    group = min(GROUP, max(4, 1 << max(0, members - 1).bit_length())) if step else GROUP
    blocks = -(-members // group)
    return group, blocks, max(1, PROGRAMS // (entries * blocks))


def is_sampled(keys: int, device: torch.device) -> tuple[Tensor, int]:
    """Which of `keys` keys are summed, bool (keys,), and for how many each of them counts: one run of `every`, not
    always the same one, so that what comes back in a text at equal distances is not always met or missed.
    """
    every = 1 << max(keys // SAMPLED, 1).bit_length() - 1
    run = torch.arange(keys, device=device) // RUN
    return run % every == run // every * 7 % every, every


def name_with_mass(
    search: QuestionSearch, mass: ClusterMass, queries: Tensor, ids: Tensor, scoring: Scoring
) -> TailPartial:
    """`search.name` for queries (kv_heads * m, head_dim) into ids, and the estimate of all that it does not name."""
    query, into = queries[None, :, None], mass.room(len(queries))
    after = mass.after(search, query, scoring, into)
    if not search.name(queries, ids, after, scale=scoring.scale):
        mass.run_plainly(search, query, ids, None, scoring, into)
    return into


def _logits(
    codes: tuple[DeviceCodes, int], queries: Tensor, named: Tensor, scoring: Scoring, shape: CodeShape
) -> Tensor:
    """float32 (m, n): what codes say of scaled products, with half the variance of what they lack; -inf if named."""
    stored, stop = codes
    scores = torch.cat(
        [code_scores(stored.space, some, queries) for some in stored.codes[:stop].split(ROWS_AT_ONCE)], 1
    )
    bases, variances = estimated(stored.space, queries)
    products = scores + bases[:, None]
    coarse = lacking(variances, scoring.scale)[:, None]
    if stored.finer is not None and shape.kept:
        # keys that were picked have finer codes, which say more of them, and lack less
        picked = stored.find(queries, min(shape.k, stop), stop)
        finer = lacking(estimated(stored.finer.space, queries)[1], scoring.scale)[:, None]
        known = stored.finer.scores_of(queries, picked) + (finer - coarse) / scoring.scale
        products = products.scatter(1, picked.clamp_min(0).long(), known)
    logits = products * scoring.scale
    if scoring.softcap is None:
        logits = logits + coarse
    else:
        # to second order: E exp(f(x + e)) = exp(f(x)) (1 + variance / 2 (f'^2 + f''))
        bent = torch.tanh(logits / scoring.softcap)
        slope = 1 - bent * bent
        logits = bent * scoring.softcap + coarse * slope * (slope - 2 * bent / scoring.softcap)
    padded = torch.cat([logits, logits.new_zeros(len(logits), 1)], dim=1)
    padded.scatter_(1, torch.where(named >= 0, named, stop).long(), -torch.inf)
    logits = padded[:, :stop]
    return torch.where(logits.isfinite(), logits, -torch.inf)
