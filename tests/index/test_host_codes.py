"""Contexts whose keys have finer codes on the host: asked, saved and opened; and what needs them and has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.errors import BackendError, ConfigError
from retrieval_attn.gpu.codes.search import CodeSearch, CodeShape
from retrieval_attn.gpu.codes.streamer import STAGED_LAYERS
from retrieval_attn.index.base import Training
from retrieval_attn.index.device import PLANNED, SPARE_TOKENS, DeviceIndex
from retrieval_attn.index.formats import Format
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.memory.plan import plan
from retrieval_attn.offload.codes import DeviceCoder
from retrieval_attn.offload.managed import CodesOnHost
from retrieval_attn.store import ContextStore
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from tests.memory.test_plan import llama3_8b
from tests.runner.graph_cases import CONFIG, FINER
from tests.tiny_models import build_model

TOKENS = 900


def context_of(config: ra.Config) -> ra.Context:
    model = ra.enable(build_model("llama"), config)
    return ra.Context(model, number_tokenizer(model.config.vocab_size), config)


def ids_of(context: ra.Context, tokens: int) -> list[int]:
    size = context._loop.model.config.vocab_size
    return torch.randint(size, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


def answer(context: ra.Context, question: list[int]) -> list[str]:
    return list(context.stream_with(question, ra.Sampling(max_new_tokens=12), question_attention="retrieval"))


def finer_indexes(context: ra.Context) -> list[Any]:
    indexes: list[Any] = list(context.cache.coded_indexes)
    assert indexes and all(isinstance(one, DeviceIndex) and one.finer_space is not None for one in indexes)
    return indexes


@pytest.mark.parametrize("tail", [False, True])
def test_asked_saved_and_opened(tail: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many keys are named as finer codes leave; the same answer after opening."""
    named: list[tuple[int, CodeShape]] = []
    run = CodeSearch._run_plainly

    def watched(self: CodeSearch, query: torch.Tensor, ids: torch.Tensor, *given: Any) -> None:
        run(self, query, ids, *given)
        named.append((int((ids >= 0).sum(dim=1).max()), self.shape))

    monkeypatch.setattr(CodeSearch, "_run_plainly", watched)
    config = CONFIG.replace(**FINER, tail=tail, graph=False)
    context = context_of(config)
    context.read(ids_of(context, TOKENS), progress=False)
    question = ids_of(context, 8)
    first = answer(context, question)
    assert named and {count for count, _ in named} == {34}
    assert {shape.k for _, shape in named} == ({36} if tail else {72})
    held = sum(one.memory.host for one in finer_indexes(context))
    assert held >= 16 * sum(len(one) for one in finer_indexes(context)), "their bytes are the host's"
    store = ContextStore(tmp_path / "store")
    context.save("finer", store=store)
    again = context_of(config).open("finer", store=store, progress=False)
    for one, other in zip(finer_indexes(context), finer_indexes(again), strict=True):
        assert (one.codes.rows().finer == other.codes.rows().finer).all()
    assert answer(again, question) == first
    again.kept.wait()


def test_opened_where_a_device_cannot_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers by the codes that it can read, of which all are named."""
    config = CONFIG.replace(**FINER, graph=False)
    context = context_of(config)
    context.read(ids_of(context, TOKENS), progress=False)
    store = ContextStore(tmp_path / "store")
    context.save("finer", store=store)
    for module in ("offload.codes", "memory.device_room"):
        monkeypatch.setattr(f"retrieval_attn.{module}.reads_host", lambda device: False)
    plain = context_of(config.replace(index_options={"key_bytes": 8, "rescore": 36}))
    plain.read(ids_of(context, TOKENS), progress=False)
    again = context_of(config).open("finer", store=store, progress=False)
    indexes: list[Any] = list(again.cache.coded_indexes)
    assert all(one.codes.device.finer is None and one.codes.host_nbytes == 0 for one in indexes)
    question = ids_of(context, 8)
    assert answer(again, question) == answer(plain, question)
    again.kept.wait()


@pytest.mark.parametrize("options", [{"key_bytes": 16}, FINER["index_options"]])
def test_all_codes_on_the_host(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is that by codes on the device; bytes are the host's; saved, opened and longer than expected."""
    monkeypatch.setattr("retrieval_attn.offload.codes.SPARE_TOKENS", 16)
    told = []
    for on_host in (False, True):
        config = CONFIG.replace(**{**FINER, "index_options": {**options, "codes_on_host": on_host}}, graph=False)
        context = context_of(config)
        ids, question = ids_of(context, TOKENS + 1500), ids_of(context, 8)
        context.read(ids[:TOKENS], progress=False)
        first = answer(context, question)
        store = ContextStore(tmp_path / str(on_host))
        context.save("codes", store=store)
        context.extend(ids[TOKENS:])
        indexes: list[Any] = list(context.cache.coded_indexes)
        again = context_of(config).open("codes", store=store, progress=False)
        opened: list[Any] = list(again.cache.coded_indexes)
        assert answer(again, question) == first
        again.kept.wait()
        told.append((first, answer(context, question)))
        for one in (*indexes, *opened):
            assert isinstance(one.codes.device, CodesOnHost) == on_host
            assert (one.memory.device == 0) == on_host and one.codes.host_nbytes >= on_host * len(one) * 8
    assert told[0] == told[1]


def test_what_codes_on_the_host_take() -> None:
    """Of Llama-3-8B's 128K, 24 bytes a key: .8 GiB on the host in place of the GPU, which has those of three layers,
    scores and clusters.
    """
    options = [{"key_bytes": 24, "codes_on_host": where} for where in (False, True)]
    plans = [plan(llama3_8b(), 131072, config={"index": PLANNED, "index_options": one}) for one in options]
    heads = 32 * 8
    assert plans[1].host_bytes - plans[0].host_bytes == heads * 131072 * 24
    away = heads - STAGED_LAYERS * 8
    assert plans[0].device_bytes - plans[1].device_bytes == away * (131072 + SPARE_TOKENS) * 24
    with pytest.raises(ConfigError, match="codes_on_host"):
        IndexSpec.of(PLANNED, {"codes_on_host": "yes"})


def test_a_search_by_finer_codes_needs_some() -> None:
    coder = DeviceCoder(torch.device("cpu"), 1)
    keys = torch.randn(500, 32, generator=torch.Generator().manual_seed(3)).numpy()
    index = DeviceIndex.build(
        keys, Format.FLOAT32, DeviceIndex.Options(key_bytes=16), Training(coder=coder.for_head(0))
    )
    search = CodeSearch(1, 2, 1, CodeShape(16, 60, 32, 20), torch.device("cpu"))
    with pytest.raises(BackendError, match="finer codes"):
        search.bind([(index.device_codes(1, 500), 500)])
