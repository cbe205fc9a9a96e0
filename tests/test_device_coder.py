"""Codes on a device: of keys that are lent there, and of keys that cross."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import ShapeError
from retrieval_attn.gpu.codes.codes import encoded
from retrieval_attn.index.device import DeviceIndex
from retrieval_attn.index.formats import Format
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.offload.codes import DeviceCoder
from tests.tiny_models import build_model, random_ids

CPU = torch.device("cpu")


def path_of(keys: np.ndarray[Any, Any]) -> tuple[SequenceKV, DeviceCoder]:
    """A path of these keys (2, n, 32) whose index is yet to be built, and its coder."""
    coder = DeviceCoder(CPU, 2)
    path = SequenceKV(2, 32, 32, Format.FLOAT32, index=IndexSpec.of("device"), layer=0)
    path.append(keys, keys)
    return path, coder


def codes_of(path: SequenceKV) -> list[Any]:
    indexes: list[Any] = [index for segment in path.segments for index in segment.indexes]
    assert all(isinstance(index, DeviceIndex) for index in indexes)
    return [index.codes.device for index in indexes]


def test_lent_keys_are_coded_in_place_of_those_that_would_cross() -> None:
    """Each head its own, once: what is inserted later crosses; a loan of another length is not taken."""
    rng = np.random.default_rng(3)
    keys, others = (rng.standard_normal((2, 700, 32), dtype=np.float32) for _ in range(2))
    path, coder = path_of(keys)
    with coder.lent(torch.from_numpy(others), None):
        path.build_index(0, 700, coder=coder)
    more = rng.standard_normal((2, 40, 32), dtype=np.float32)
    path.append(more, more)
    path.extend_index(740)
    for head, codes in enumerate(codes_of(path)):
        wanted = np.concatenate([others[head], more[head]])
        assert codes.length == 740
        assert torch.equal(codes.codes[:740], encoded(codes.space, torch.from_numpy(wanted)))
    path, coder = path_of(keys)
    with coder.lent(torch.from_numpy(others[:, :600]), None):
        path.build_index(0, 700, coder=coder)
    for head, codes in enumerate(codes_of(path)):
        assert torch.equal(codes.codes[:700], encoded(codes.space, torch.from_numpy(keys[head])))


def test_lent_keys_that_are_not_finite_are_refused() -> None:
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((2, 300, 32), dtype=np.float32)
    path, coder = path_of(keys)
    bad = torch.from_numpy(keys.copy())
    bad[1, 7, 3] = torch.inf
    with coder.lent(bad, None), pytest.raises(ShapeError, match="finite"):
        path.build_index(0, 300, coder=coder)


@pytest.mark.cuda
@pytest.mark.parametrize("batch", [1, 2])
def test_a_prefill_on_a_gpu_codes_the_keys_that_the_host_has(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing crosses twice; the codes are those of the host's keys."""
    monkeypatch.setattr("retrieval_attn.offload.codes._Outbox.filled", lambda *given: pytest.fail("keys cross again"))
    model: Any = build_model("llama").to(torch.bfloat16).cuda()
    config = ra.Config(sink=4, window=16, retrieve=8, index="device", prefill_chunk=256)
    ra.enable(model, config)
    try:
        cache = ra.RetrievalCache(model, config)
        with torch.no_grad():
            model(input_ids=random_ids(batch, 1500).cuda(), past_key_values=cache)
        layers: list[Any] = list(cache.layers)
        for layer in layers:
            layer.finish_index()
            for host in layer.hosts:
                (segment,) = host.segments
                keys, _ = segment.read(*segment.indexed)
                for head, codes in enumerate(codes_of(host)):
                    stored = torch.from_numpy(keys[head]).view(torch.bfloat16).float().cuda()
                    assert codes.length == len(stored) > 1000
                    same = codes.codes[: codes.length] == encoded(codes.space, stored)
                    assert same.float().mean() > 0.999  # products in another order, at the edge of a step
    finally:
        ra.disable(model)
