"""int8 on the host as a model sees it: tensors to rows and back, contexts that read, grow, fork and answer."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.attend import attend_range_heads
from retrieval_attn.index.flat import search_exact
from retrieval_attn.index.formats import Format, from_float32, to_float32
from retrieval_attn.offload import staging
from retrieval_attn_eval.recording.options import RecordOptions
from retrieval_attn_eval.recording.record import record
from retrieval_attn_eval.tasks import make_sample, score
from tests.gpu.test_decode_kernels import INTERPRETED
from tests.tiny_models import QUESTION, needle_text, random_ids, tiny_model

INT8 = Format.INT8
CONFIG = ra.Config(sink=8, window=64, retrieve=50, prefill_chunk=512, host_dtype="int8")


def hard_rows() -> torch.Tensor:
    """Rows (3, 40, 13) of all sizes: zeros, denormals, the largest float32, NaN and infinities."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-44, 38, (3, 40, 1), generator=generator)
    rows = torch.randn(3, 40, 13, generator=generator) * sizes
    rows[0, 0], rows[0, 3] = 0, torch.finfo(torch.float32).max
    rows[0, 5] = torch.cat([torch.tensor([127.0]), torch.arange(12) - 5.5])  # of a step of 1: halves
    rows[0, 1, 3], rows[0, 2, 0], rows[0, 4, 1] = torch.nan, torch.inf, -torch.inf
    return rows


def check_bits(device: str, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)) -> None:
    """`pack` gives the bits of `from_float32`, `to_device` the numbers of `to_float32`, whatever they are cut into."""
    for dtype in dtypes:
        rows = hard_rows().to(dtype)
        rows = torch.where(rows.float().isfinite(), rows, rows.new_tensor(torch.nan)) if dtype.itemsize == 2 else rows
        wanted = from_float32(rows.float().numpy(), INT8)
        for given in (rows, rows.transpose(0, 1).contiguous().transpose(0, 1)):
            packed = staging.pack(given.to(device), INT8).cpu().numpy()
            np.testing.assert_array_equal(packed, wanted)
    plain = staging.to_device(wanted, INT8, torch.zeros(1, device=device))
    np.testing.assert_array_equal(plain.cpu().numpy(), to_float32(wanted, INT8))
    assert staging.to_device(wanted[:, :0], INT8, plain).shape == (3, 0, 13)
    assert staging.pack(plain[:, :0], INT8).shape == (3, 0, 17)


def test_tensors_become_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a division, a rounding or a clip differs, or if a block's border moves a row."""
    check_bits("cpu")
    monkeypatch.setattr(staging, "_AT_ONCE", 100)
    monkeypatch.setattr(staging, "_TOKENS_AT_ONCE", 7)
    check_bits("cpu")


@pytest.mark.cuda
def test_tensors_become_the_same_bits_on_a_device() -> None:
    """What is packed on a GPU is searched on the CPU: one other bit would be one other step."""
    check_bits("cuda")


@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 runs the kernels here")
def test_tensors_become_the_same_bits_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrieval_attn.gpu.attention import int8_triton

    monkeypatch.setattr(staging, "kernels_for", lambda tensor, module: int8_triton)
    check_bits("cpu", (torch.float32, torch.float16))  # Triton's interpreter loses bits of tiny numbers in bfloat16


@pytest.mark.parametrize("append", ["exact", "retrieval"])
def test_append_crop_and_fork(append: Literal["exact", "retrieval"]) -> None:
    """With all keys retrieved, logits stay within int8's error of eager attention through turns, crops and forks.

    Breaks if the host's keys visit the device as steps, a crop reads back other rows, or a fork shares a tail.
    """
    model = tiny_model("llama")
    config = ra.Config(sink=4, window=16, retrieve="all", question_attention=append, host_dtype="int8")
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
    context = ra.Context(*loaded, config).read(needle_text(6_000))
    # 5 layers of 2 heads of 64: a key and a value of 68 bytes each, and no codes; clusters lie beside them
    hosts = [layer.hosts[0] for layer in context.cache.layers if isinstance(layer, RetrievalLayer)]
    clusters = sum(host.clusters.nbytes.host for host in hosts if host.clusters is not None)
    assert len(hosts) == 5 and 0 < clusters == context.cache.host_nbytes - 5 * 2 * context.num_tokens * (68 + 68)
    assert "7391846" in context.ask(QUESTION, max_new_tokens=16, question_attention="retrieval").text
    fork = context.fork().extend(" The special magic Turin number is: 1112223. ")
    assert "1112223" in fork.ask("What is the special magic Turin number?", max_new_tokens=16).text
    assert "1112223" not in context.ask("What is the special magic Turin number?", max_new_tokens=16).text


def test_answers_agree_with_the_models_dtype(loaded: tuple[Any, Any]) -> None:
    """At 2,048 tokens the answer is not lost to int8: the text is that of the model's dtype."""
    model, tokenizer = loaded
    sample = make_sample("niah_multikey_1", 2048, 50_000, tokenizer)
    texts = []
    for dtype in ("auto", "int8"):
        context = ra.Context(model, tokenizer, ra.Config(index="flat", retrieve=100, host_dtype=dtype))
        context.read(tokenizer(sample.context)["input_ids"], progress=False)
        texts.append(context.ask(sample.question, raw=True, max_new_tokens=sample.max_new_tokens).text)
    assert texts[0] == texts[1] and score(sample, texts[0]) == 1.0


def test_error_of_attention_on_the_models_own_keys(loaded: tuple[Any, Any]) -> None:
    """int8 has 127 steps where bfloat16 has 128 to 256 per octave: a few times its error is right, more is wrong.

    Against float64 over the numbers before they were stored, as a share of the head's largest value; and of the exact
    best 100 keys, how many are still found.
    """
    model, tokenizer = loaded
    sample = make_sample("niah_multikey_1", 1024, 50_000, tokenizer)
    after = tokenizer(sample.question + sample.completion, add_special_tokens=False)["input_ids"]
    options = RecordOptions(train=0, storage="float32")
    heads = record(model, tokenizer(sample.context)["input_ids"], after, options).heads
    assert len(heads) == 10
    errors: dict[Format, list[np.ndarray]] = {Format.FLOAT32: [], Format.BFLOAT16: [], INT8: []}
    recalls = []
    for head in heads:
        queries = np.ascontiguousarray(head.decode.reshape(1, -1, head.decode.shape[-1]))
        scores = queries[0].astype(np.float64) @ head.keys.astype(np.float64).T
        weights = np.exp(head.scale * (scores - scores.max(axis=1, keepdims=True)))
        right = weights @ head.values / weights.sum(axis=1, keepdims=True)
        for fmt, found in errors.items():
            keys, values = (from_float32(array[None], fmt) for array in (head.keys, head.values))
            out, _ = attend_range_heads(queries, keys, values, 0, keys.shape[1], fmt, head.scale)
            found.append(np.abs(out[0] - right).max(axis=1) / np.abs(head.values).max())
        best = search_exact(keys[0], queries[0], 100, INT8).ids
        wanted = np.argpartition(-scores, 100, axis=1)[:, :100]
        recalls += [len(np.intersect1d(a, b)) / 100 for a, b in zip(best, wanted, strict=True)]
    float32, bfloat16, int8 = (float(np.median(np.concatenate(found))) for found in errors.values())
    assert float32 < 1e-6 < bfloat16 < int8 < 8 * bfloat16
    assert np.median(recalls) >= 0.97
