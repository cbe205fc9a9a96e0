"""Long questions through codes: keys come to the device, and the answer is the one that the host gives.

On a CPU "the device" is the CPU, the keys lie where they are, and PyTorch gathers; the `cuda` twins upload them and run
the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention import device_codes
from retrieval_attn.attention.device_codes import CodedRange, DeviceGather, HostGather
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sequence import Batch, LayerUploads, Sequence
from retrieval_attn.attention.source import TokenRange
from retrieval_attn.cpu.step.plan import StepCost
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.gpu.attention.merge import Scoring
from retrieval_attn.gpu.codes import candidates as named_keys
from retrieval_attn.index.formats import Format, from_float32
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.offload import upload
from retrieval_attn.offload.codes import DeviceCoder
from retrieval_attn.offload.page_lock import lock_pages
from retrieval_attn.runner.ready import question_lengths
from tests.attention.test_questions import compiled  # noqa: F401  (a fixture)
from tests.tiny_models import QUESTION, Loaded, build_model, needle_text, random_ids

SINKS, K, SCALE = 4, 20, 0.09
Answer = tuple[torch.Tensor, torch.Tensor, StepCost]


def path_of(
    fmt: Format = Format.FLOAT32,
    *,
    kv_heads: int = 2,
    dim: int = 32,
    tokens: int = 1100,
    tail: int = 200,
    more: int = 0,
    device: str = "cpu",
) -> SequenceKV:
    """A path of normal numbers, indexed but for the last `tail` tokens; `more` lie in a segment of their own."""
    rng = np.random.default_rng(0)
    path = SequenceKV(kv_heads, dim, dim, fmt, index=IndexSpec.of("device"), layer=3).reserve(tokens)

    def append(count: int) -> None:
        shape = kv_heads, count, dim
        keys, values = (from_float32(rng.standard_normal(shape, np.float32), fmt) for _ in range(2))
        path.append(keys, values)

    append(tokens)
    if device != "cpu":
        lock_pages(path.segments[0])
    queries = rng.standard_normal((kv_heads, 64, dim), np.float32)
    path.build_index(SINKS, tokens - tail, queries, coder=DeviceCoder(torch.device(device), kv_heads))
    if more:
        path = path.fork()
        append(more)
        assert len(path.segments) == 2
    return path


def over(path: SequenceKV, k: int = K) -> CodedRange:
    found = CodedRange.of(TokenRange(path, [0], SINKS, len(path)), k, path.spec)
    assert found is not None
    return found


def asked(n: int, q_heads: int = 8, dim: int = 32, device: str = "cpu") -> torch.Tensor:
    return torch.randn(q_heads, n, dim, generator=torch.Generator().manual_seed(n)).to(device)


def uploads_of(*paths: SequenceKV, device: str = "cpu") -> LayerUploads:
    """Of the first layer of a batch whose layers have these paths."""
    batch, where = Batch(), torch.empty(0, device=device).device
    batch.sequences.append(Sequence())
    batch.sequences[0].kv = dict(enumerate(paths))
    batch.devices = dict.fromkeys(range(len(paths)), where)
    return LayerUploads(batch, 0, where)


def on_host(path: SequenceKV, queries: torch.Tensor, softcap: float | None = None, k: int = K) -> Answer:
    part, cost = HostGather(over(path, k), queries, Scoring(SCALE, softcap)).finish()
    return part.out.cpu(), part.lse.cpu(), cost


def by_upload(
    path: SequenceKV,
    queries: torch.Tensor,
    softcap: float | None = None,
    uploads: LayerUploads | None = None,
    k: int = K,
) -> Answer:
    uploads = uploads_of(path, device=queries.device.type) if uploads is None else uploads
    part, cost = DeviceGather(over(path, k), queries, uploads, Scoring(SCALE, softcap)).finish()
    return part.out.cpu(), part.lse.cpu(), cost


def agree(mine: Answer, right: Answer, atol: float = 2e-6, tied_rows: float = 0.0) -> None:
    """The same up to rounding, from the same keys.

    tied_rows: in this share of rows another key may be taken, of the same score up to rounding: it weighs the same.
    """
    torch.testing.assert_close(mine[1], right[1], rtol=0, atol=atol, equal_nan=True)
    same = torch.isclose(mine[0], right[0], rtol=0, atol=atol, equal_nan=True).all(dim=-1)
    assert float((~same).float().mean()) <= tied_rows
    assert mine[2].keys_scanned == right[2].keys_scanned


@pytest.mark.parametrize("n", [1, 7, 130])
@pytest.mark.parametrize("fmt", [Format.FLOAT32, Format.BFLOAT16, Format.INT8])
def test_the_answer_is_the_hosts(fmt: Format, n: int) -> None:
    """Group 4, with newest tokens that have no codes."""
    path, queries = path_of(fmt), asked(n)
    found = by_upload(path, queries)
    agree(found, on_host(path, queries))
    assert found[2].bytes_read == path.nbytes


@pytest.mark.parametrize("tail,more", [(0, 0), (1, 0), (0, 30), (200, 30), (5, 300)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_with_newest_tokens_and_several_segments(tail: int, more: int, softcap: float | None) -> None:
    path, queries = path_of(tail=tail, more=more), asked(20)
    agree(by_upload(path, queries, softcap), on_host(path, queries, softcap))


@pytest.mark.parametrize("group", [1, 8])
def test_heads_come_in_blocks_and_queries_in_turns(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads and then one, three turns with the last one shorter, rows gathered in pieces: the same answer."""
    path, queries = path_of(kv_heads=3, tail=30), asked(50, 3 * group)
    expected = on_host(path, queries)
    monkeypatch.setattr(upload, "BLOCK_BYTES", 2 * path.nbytes // 3)
    monkeypatch.setattr(device_codes, "MOST_CANDIDATES", 18 * 3 * group * over(path).shape.room)
    monkeypatch.setattr(named_keys, "NUMBERS_AT_ONCE", 7 * 64 * 32)
    part = DeviceGather(over(path), queries, uploads_of(path), Scoring(SCALE))
    assert [one.stop - one.start for one in part._chunks] == [17, 17, 16]
    part.begin()
    out, cost = part.finish()
    agree((out.out, out.lse, cost), expected)


def test_more_is_wanted_than_there_is_without_codes() -> None:
    """k above the number of newest tokens, and few keys in all."""
    path, queries = path_of(tokens=300, tail=10), asked(9)
    agree(by_upload(path, queries, k=30), on_host(path, queries, k=30))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_goes_to_the_host(wrong: float) -> None:
    """Which looks at every key for it: the others get what they always get."""
    path, queries = path_of(), asked(20)
    queries[3, 7, 2] = wrong
    found, right = by_upload(path, queries, 5.0), on_host(path, queries, 5.0)
    agree(found, right)
    assert int(found[1].isfinite().sum()) >= found[1].numel() - 1


def test_from_where_on_keys_come() -> None:
    """Twice the context, twice the tokens; twice the query heads, half of them. On a CPU never."""
    path = path_of(tokens=2000)
    row = 32 * 4
    per_token = 8 * (over(path).shape.k + K) * row
    assert over(path).least_positions(8) == -(-len(path) * 2 * 2 * row // per_token)
    assert over(path).least_positions(16) == -(-len(path) * 2 * 2 * row // (2 * per_token))
    assert not over(path).device_gathers(asked(10_000, 2), uploads_of(path))


def taken(monkeypatch: pytest.MonkeyPatch, answer: bool | None) -> list[int]:
    """Positions of the questions that keys came for. answer: of `device_gathers`, None: its own."""
    positions: list[int] = []
    before = DeviceGather.finish

    def noted(self: DeviceGather) -> Any:
        positions.append(self._queries.shape[1])
        return before(self)

    monkeypatch.setattr(DeviceGather, "finish", noted)
    if answer is not None:
        monkeypatch.setattr(CodedRange, "device_gathers", lambda *given: answer)
    return positions


def logits_of(device: str, lengths: list[int], **options: Any) -> torch.Tensor:
    """Of a context, and of questions of so many tokens after it, one after the other; a small model in float32."""
    model = build_model("llama", **options).to(device)
    ids = random_ids(2, 1500 + sum(lengths))
    config = ra.Config(sink=4, window=32, retrieve=16, question_attention="retrieval", index="device", graph=False)
    ra.enable(model, config)
    cache = ra.RetrievalCache(model, config)
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for part in ids.split([1500, *lengths], dim=1):
            # both rows are one context, then each has its own questions
            part = part[:1].expand(2, -1) if not found else part
            found.append(model(input_ids=part.to(device), past_key_values=cache).logits.cpu())
            if len(found) == 1:
                cache.batch_select_indices(torch.tensor([0, 0]))
    ra.disable(model)
    return torch.cat(found[1:], dim=1)


def test_a_model_answers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows over one context; the later questions come when rows have tokens of their own."""
    right = logits_of("cpu", [40, 60, 1, 50])
    positions = taken(monkeypatch, True)
    mine = logits_of("cpu", [40, 60, 1, 50])
    assert positions and set(positions) <= {80, 120, 2, 100}  # both rows at once, while they share a path
    assert (mine - right).abs().max() < 1e-4


def test_what_it_costs_is_counted(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer's statistics: the same scores computed, the layer's rows read once, not those of each query."""
    config = ra.Config(sink=4, window=64, retrieve=24, index="device", question_attention="retrieval")
    context = ra.Context(*loaded, config).read(needle_text(8000), progress=False)
    question = needle_text(900)[-700:] + QUESTION
    host = context.ask(question, raw=True, max_new_tokens=1)
    positions = taken(monkeypatch, True)
    device = context.ask(question, raw=True, max_new_tokens=1)
    assert len(positions) >= 1 and device.tokens == host.tokens
    assert device.stats.keys_scanned == host.stats.keys_scanned
    assert device.stats.host_seconds > 0


def test_both_ways_are_rehearsed(loaded: Loaded) -> None:
    """At the end of a read: with a short question, and with the shortest that keys come for."""
    config = ra.Config(sink=4, window=64, retrieve=24, index="device")
    context = ra.Context(*loaded, config).read(needle_text(8000), progress=False)
    layer: Any = next(layer for layer in context.cache.layers if isinstance(layer, RetrievalLayer))
    start, stop = layer.held.ranges[0]
    found = CodedRange.of(TokenRange(layer.hosts[0], [0], start, stop), 24, layer.index.spec, True)
    assert found is not None
    assert question_lengths(layer, layer.held) == [2, found.least_positions(layer.q_heads)]


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("fmt", [Format.BFLOAT16, Format.INT8])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_answer_is_the_hosts_on_a_gpu(
    dim: int,
    group: int,
    fmt: Format,
    monkeypatch: pytest.MonkeyPatch,
    compiled: list[str],  # noqa: F811
) -> None:
    """Blocks of one head, and of all; nothing is compiled for another length, of question, context or tail."""
    path = path_of(fmt, kv_heads=3, dim=dim, tokens=9000, tail=300, device="cuda")
    longer = path_of(fmt, kv_heads=3, dim=dim, tokens=10_001, tail=7, more=40, device="cuda")
    by_upload(path, asked(3, 3 * group, dim, "cuda"))
    before = len(compiled)
    for n, one, block_bytes in ((130, path, 1), (33, longer, 1), (700, path, 1 << 30)):
        monkeypatch.setattr(upload, "BLOCK_BYTES", block_bytes)
        queries = asked(n, 3 * group, dim, "cuda")
        agree(by_upload(one, queries), on_host(one, queries), atol=1e-5, tied_rows=1e-3)
    assert compiled[before:] == []


@pytest.mark.cuda
def test_the_next_layers_keys_are_sent_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there when it asks, and memory goes when the last layer is done."""
    monkeypatch.setattr(upload, "BLOCK_BYTES", 1)
    first, second = path_of(tokens=9000, device="cuda"), path_of(tokens=9000, tail=100, device="cuda")
    uploads, queries = uploads_of(first, second, device="cuda"), asked(200, device="cuda")
    agree(by_upload(first, queries, uploads=uploads), on_host(first, queries), atol=2e-5)
    ring = uploads._uploads()
    assert [block.cut.first_head for block in ring._ahead] == [0, 1]
    assert ring._ahead[0].cut.parts[0].segment is second.segments[0]
    last = LayerUploads(uploads._batch, 1, queries.device)
    agree(by_upload(second, queries, uploads=last), on_host(second, queries), atol=2e-5)
    assert not ring._ahead and not ring._free


@pytest.mark.cuda
def test_without_room_the_host_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks do not fit, or would leave too little; and below the length from which on keys come."""
    path = path_of(tokens=9000, device="cuda")
    uploads, queries = uploads_of(path, device="cuda"), asked(over(path).least_positions(8), device="cuda")
    assert not over(path).device_gathers(queries[:, 1:], uploads)
    assert over(path).device_gathers(queries, uploads)
    uploads.clear()
    monkeypatch.setattr(upload, "HEADROOM", 1 << 50)
    assert not over(path).device_gathers(queries, uploads)
    monkeypatch.setattr(upload, "HEADROOM", 0)
    assert not over(path).device_gathers(queries, uploads)  # one refusal is for all layers
    uploads = uploads_of(path, device="cuda")
    monkeypatch.setattr(upload, "spare_bytes", lambda device: 1 << 60)
    monkeypatch.setattr(upload.UploadSpan, "block_bytes", 1 << 45)
    assert not over(path).device_gathers(queries, uploads) and not uploads._uploads()._free


@pytest.mark.cuda
def test_a_model_answers_the_same_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """head_dim 128, group 4: the way is chosen by length, questions of some hundred tokens and one of 1,024."""
    shape = {
        "hidden_size": 1024,
        "head_dim": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 40_000,
    }
    monkeypatch.setattr(device_codes, "GATHERED_PER_UPLOADED", 1e9)
    right = logits_of("cuda", [300, 1024, 1, 200], **shape)
    monkeypatch.setattr(device_codes, "GATHERED_PER_UPLOADED", 1e-9)
    positions = taken(monkeypatch, None)
    mine = logits_of("cuda", [300, 1024, 1, 200], **shape)
    assert 600 in positions
    assert (mine - right).abs().max() < 1e-3
