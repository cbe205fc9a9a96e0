"""int8 on the host as a model sees it: tensors to rows and back, contexts that read, grow, fork and answer."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.eval.bench import host_dtype as bench_host_dtype
from retrieval_attn.index.formats import Format, from_float32, to_float32
from retrieval_attn.offload import transfer
from tests.test_tensor_parallel import QUESTION, text_with_needle
from tests.tiny_models import random_ids, tiny_model

INT8 = Format.INT8
CONFIG = ra.Config(sink=8, window=64, spill=16, retrieve=50, prefill_chunk=512, host_dtype="int8")


def hard_rows() -> torch.Tensor:
    """Rows (3, 40, 13) of all sizes: zeros, denormals, the largest float32, NaN and infinities."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-44, 38, (3, 40, 1), generator=generator)
    rows = torch.randn(3, 40, 13, generator=generator) * sizes
    rows[0, 0], rows[0, 3] = 0, torch.finfo(torch.float32).max
    rows[0, 1, 3], rows[0, 2, 0], rows[0, 4, 1] = torch.nan, torch.inf, -torch.inf
    return rows


def check_bits(device: str) -> None:
    """`pack` gives the bits of `from_float32`, `to_device` the numbers of `to_float32`, whatever they are cut into."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = hard_rows().to(dtype)
        rows = torch.where(rows.float().isfinite(), rows, rows.new_tensor(torch.nan)) if dtype.itemsize == 2 else rows
        wanted = from_float32(rows.float().numpy(), INT8)
        for given in (rows, rows.transpose(0, 1).contiguous().transpose(0, 1)):
            packed = transfer.to_host(given.to(device), INT8)
            np.testing.assert_array_equal(packed, wanted)
    plain = transfer.to_device(wanted, INT8, torch.zeros(1, device=device))
    np.testing.assert_array_equal(plain.cpu().numpy(), to_float32(wanted, INT8))
    assert transfer.to_device(wanted[:, :0], INT8, plain).shape == (3, 0, 13)
    assert transfer.pack(plain[:, :0], INT8).shape == (3, 0, 17)


def test_tensors_become_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a division, a rounding or a clip differs, or if a block's border moves a row."""
    check_bits("cpu")
    monkeypatch.setattr(transfer, "_AT_ONCE", 100)
    monkeypatch.setattr(transfer, "_TOKENS_AT_ONCE", 7)
    check_bits("cpu")


@pytest.mark.cuda
def test_tensors_become_the_same_bits_on_a_device() -> None:
    """What is packed on a GPU is searched on the CPU: one other bit would be one other step."""
    check_bits("cuda")


@pytest.mark.parametrize("append", ["exact", "retrieval"])
def test_append_crop_and_fork(append: str) -> None:
    """With all keys retrieved, logits stay within int8's error of eager attention through turns, crops and forks.

    Breaks if the host's keys visit the device as steps, a crop reads back other rows, or a fork shares a tail.
    """
    model = tiny_model("llama")
    config = ra.Config(sink=4, window=16, spill=8, retrieve="all", exact_append=append == "exact", host_dtype="int8")
    ids = random_ids(1, 150)
    with torch.no_grad():
        right = model(ids).logits[:, -1]
        ra.enable(model, config)
        try:
            cache = ra.RetrievalCache(model)
            model(ids[:, :100], past_key_values=cache)
            model(ids[:, 100:140], past_key_values=cache)
            other = cache.fork()
            model(random_ids(1, 30), past_key_values=other)
            cache.crop(90)
            model(ids[:, 90:149], past_key_values=cache)
            got = model(ids[:, 149:], past_key_values=cache).logits[:, -1]
        finally:
            ra.disable(model)
    error = (got - right).abs().max() / right.abs().max()
    assert 0 < error < 0.02, f"{float(error):.4f}"


def test_a_context_holds_half_and_answers(loaded: tuple[Any, Any]) -> None:
    """Bytes to the last one; the answer stands 700 tokens back, behind an index over int8 keys."""
    config = CONFIG.replace(index="flat", index_options={"codes": "int8"})
    context = ra.Context(*loaded, config).read(text_with_needle(6_000))
    # 5 layers of 2 heads of 64: a key and a value of 68 bytes each, and no codes
    assert context.cache.host_nbytes == 5 * 2 * context.num_tokens * (68 + 68)
    assert "7391846" in context.ask(QUESTION, max_new_tokens=16, append="retrieval").text
    fork = context.fork().extend(" The special magic Turin number is: 1112223. ")
    assert "1112223" in fork.ask("What is the special magic Turin number?", max_new_tokens=16).text
    assert "1112223" not in context.ask("What is the special magic Turin number?", max_new_tokens=16).text


def test_answers_agree_with_bfloat16(loaded: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison of dtypes itself, on one sample: at 2,048 tokens the answer is not lost to int8.

    The errors of attention on the model's own keys: int8 has 127 steps where bfloat16 has 128 to 256 per octave, so a
    few times its error is right, and as much as it is wrong.
    """
    parser = argparse.ArgumentParser()
    bench_host_dtype.add_arguments(parser)
    args = parser.parse_args(["--tasks", "niah_multikey_1", "--samples", "1", "--tokens", "2048"])
    rows = bench_host_dtype.answers(*loaded, args, ["bfloat16", "int8"])
    assert [(row["bfloat16"], row["int8"], row["int8: same text"]) for row in rows] == [(100.0, 100.0, "1 of 1")]
    args.tokens = 1024
    float32, bfloat16, int8 = bench_host_dtype.errors(*loaded, args, ["float32", "bfloat16", "int8"])
    assert float32["out median"] < 1e-6 < bfloat16["out median"] < int8["out median"] < 8 * bfloat16["out median"]
    assert int8["recall median"] >= 0.97 and int8["heads"] == 10
