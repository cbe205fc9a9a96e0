"""attend() and every backend behind it against the float64 reference; CUDA cases run where there is a device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from retrieval_attn.errors import BackendError, ConfigError, ShapeError
from retrieval_attn.gpu.attention import flash as flash_math
from retrieval_attn.gpu.attention.flash import BACKENDS, attend
from retrieval_attn.gpu.attention.merge import Partial
from tests.reference.attention import reference_attention

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
ON_CPU_FEW = pytest.mark.parametrize(
    ("device", "head_dim"),
    [("cpu", 64), *(pytest.param("cuda", dim, marks=pytest.mark.cuda) for dim in (64, 80, 128, 256))],
)
SCALE = 0.2


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Case:
    """What a call asks besides its tensors."""

    name: str
    queries: int
    keys: int
    causal: bool = False
    softcap: float | None = None

    def mask(self, device: str) -> Tensor | None:
        """The same visibility, written out for the reference."""
        if not self.causal:
            return None
        behind = [[self.keys - self.queries + i - t for t in range(self.keys)] for i in range(self.queries)]
        return torch.tensor([[tokens >= 0 for tokens in row] for row in behind], device=device)


CASES = (
    Case("one key", 1, 1),
    Case("decode", 1, 700),
    Case("rectangle", 63, 130),
    Case("square causal", 65, 65, causal=True),
    Case("causal after a past", 33, 150, causal=True),
    Case("causal after thirteen times as many", 16, 224, causal=True),
    Case("causal, queries before the first key", 40, 25, causal=True),
    Case("causal, one key", 5, 1, causal=True),
    Case("soft-cap", 33, 150, causal=True, softcap=3.0),
    Case("soft-cap, decode", 1, 640, softcap=3.0),
)


def tensors(
    device: str, dtype: torch.dtype, group: int, head_dim: int, queries: int, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Random (query, key, value) for 2 rows and 2 key heads."""
    generator = torch.Generator().manual_seed(group * 1000 + head_dim + keys)
    query = torch.randn(2, 2 * group, queries, head_dim, generator=generator)
    key, value = torch.randn(2, 2, 2, keys, head_dim, generator=generator)
    return query.to(device, dtype), key.to(device, dtype), value.to(device, dtype)


def compare(name: str, case: Case, group: int, inputs: tuple[Tensor, Tensor, Tensor], got: Partial) -> None:
    """Output within the dtype's rounding of weights and values, lse to float32, exact 0 and -inf for no key."""
    expected = reference_attention(*inputs, scale=SCALE, mask=case.mask(str(inputs[0].device)), softcap=case.softcap)
    where = f"{name}, {case.name}, {group} queries per key head"
    assert got.out.dtype == got.lse.dtype == torch.float32, where
    assert got.out.shape == expected.out.shape and got.lse.shape == expected.lse.shape, where
    # The flash-attn packages take tanh from an instruction with 11 good bits.
    rough = case.softcap * 2**-10 if case.softcap is not None and name.startswith("flash-attn") else 0.0
    largest = float(inputs[2].abs().max())
    allowed = max(1e-5, torch.finfo(inputs[0].dtype).eps * largest) + 4 * rough
    if inputs[0].dtype == torch.float32:
        # a score is off by eps times the sum of |q k|, and its weight by that much of itself
        query, key = inputs[0].abs(), inputs[1].abs().repeat_interleave(group, dim=1)
        scores = SCALE * float((query @ key.transpose(-1, -2)).max())
        allowed = max(allowed, torch.finfo(torch.float32).eps * largest * scores)
    assert (got.out - expected.out).abs().max() <= allowed, where
    empty = torch.isneginf(expected.lse)
    assert torch.equal(torch.isneginf(got.lse), empty), where
    assert torch.equal(got.out[empty], torch.zeros_like(got.out[empty])), where
    error = (got.lse - expected.lse)[~empty].abs()
    if len(error):
        assert error.max() <= 2e-5 * max(1.0, float(expected.lse[~empty].abs().max())) + rough, where


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_in_planned_pieces(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """Padded queries, and earlier keys in pieces; on the CPU `test_a_kernel_that_plans_is_called_with_few_shapes`."""
    monkeypatch.setattr(flash_math, "PLANNED_KEYS", (256, 64, 16))
    if reason := BACKENDS["torch-cudnn"].missing(torch.device("cuda")):
        pytest.skip(reason)
    for past, queries in ((0, 100), (16, 64), (720, 100), (333, 33)):
        inputs = tensors("cuda", torch.bfloat16, 4, 128, queries, past + queries)
        got = attend(*inputs, scale=SCALE, causal=causal, backends=["torch-cudnn"])
        compare("planned", Case("", queries, past + queries, causal=causal), 4, inputs, got)


@ON_CPU_FEW
@pytest.mark.parametrize("name", BACKENDS)
@DTYPES
def test_each_backend_equals_the_reference(device: str, name: str, dtype: torch.dtype, head_dim: int) -> None:
    """Every case a backend accepts, for 1, 4 and 8 queries per key head."""
    if reason := BACKENDS[name].missing(torch.device(device)):
        pytest.skip(f"{name}: {reason}")
    served, refusal = 0, ""
    for group in (1, 4, 8):
        for case in CASES:
            inputs = tensors(device, dtype, group, head_dim, case.queries, case.keys)
            try:
                got = attend(*inputs, scale=SCALE, causal=case.causal, softcap=case.softcap, backends=[name])
            except BackendError as error:
                refusal = str(error)
                continue
            compare(name, case, group, inputs, got)
            served += 1
    if not served:
        pytest.skip(refusal)


@pytest.mark.parametrize(
    ("device", "head_dim"),
    [("cpu", 80), *(pytest.param("cuda", dim, marks=pytest.mark.cuda) for dim in (64, 256, 320))],
)
@DTYPES
def test_every_case_is_served_by_some_backend(device: str, dtype: torch.dtype, head_dim: int) -> None:
    for case in CASES:
        inputs = tensors(device, dtype, 4, head_dim, case.queries, case.keys)
        got = attend(*inputs, scale=SCALE, causal=case.causal, softcap=case.softcap)
        compare("flash-attn", case, 4, inputs, got)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", BACKENDS)
@DTYPES
def test_mask_soft_cap_and_empty_rows(
    device: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask with a row that sees nothing: 0 and -inf there, not NaN. The math backend in several blocks."""
    if reason := BACKENDS[name].missing(torch.device(device)):
        pytest.skip(f"{name}: {reason}")
    monkeypatch.setattr(flash_math, "MAX_SCORES", 5000)
    query, key, value = tensors(device, dtype, 4, 32, 37, 90)
    per_row = torch.rand(2, 1, 37, 90, generator=torch.Generator().manual_seed(1)).to(device) < 0.4
    per_row[0, :, 5] = False
    padding = torch.arange(90, device=device).repeat(2, 1, 1, 1) > 11
    for mask in (per_row, padding, per_row[0, 0]):
        for softcap in (None, 2.0):
            expected = reference_attention(query, key, value, scale=0.5, mask=mask, softcap=softcap)
            try:
                got = attend(query, key, value, scale=0.5, mask=mask, softcap=softcap, backends=[name])
            except BackendError:
                assert name != "math"
                continue
            close = max(1e-5, torch.finfo(dtype).eps * float(value.abs().max()))
            assert (got.out - expected.out).abs().max() <= close
            finite = torch.isfinite(expected.lse)
            assert torch.equal(torch.isneginf(got.lse), ~finite)
            assert torch.equal(got.out[~finite], torch.zeros_like(got.out[~finite]))
            assert (got.lse - expected.lse)[finite].abs().max() <= 2e-5


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", BACKENDS)
def test_no_keys_is_an_empty_partial(device: str, name: str) -> None:
    query, key, value = tensors(device, torch.bfloat16, 2, 64, 3, 1)
    for causal in (False, True):
        got = attend(query, key[:, :, :0], value[:, :, :0], scale=1.0, causal=causal, backends=[name])
        assert torch.equal(got.out, torch.zeros(2, 4, 3, 64, device=device)) and torch.isneginf(got.lse).all()
    got = attend(query[:, :, :0], key, value, scale=1.0)
    assert got.out.shape == (2, 4, 0, 64) and got.lse.shape == (2, 4, 0)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_values_of_another_width_and_strided_views(device: str) -> None:
    """value_dim != head_dim, key and value as slices of one buffer, a query whose last axis is strided."""
    query, key, value = tensors(device, torch.float32, 4, 64, 7, 50)
    expected = reference_attention(query, key, value[..., :24], scale=SCALE)
    got = attend(query, key, value[..., :24], scale=SCALE)
    assert (got.out - expected.out).abs().max() <= 2e-6
    both = torch.cat([key, value], dim=3)
    strided = query.transpose(2, 3).contiguous().transpose(2, 3)
    got = attend(strided, both[..., :64], both[..., 64:], scale=SCALE)
    expected = reference_attention(query, key, value, scale=SCALE)
    assert (got.out - expected.out).abs().max() <= 2e-6 and (got.lse - expected.lse).abs().max() <= 2e-5


@pytest.mark.cuda
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_decode_call_replays_in_a_cuda_graph(name: str, head_dim: int) -> None:
    """Captured once, replayed on new contents of the same buffers: equal to a fresh call."""
    if reason := BACKENDS[name].missing(torch.device("cuda")):
        pytest.skip(f"{name}: {reason}")
    query, key, value = tensors("cuda", torch.bfloat16, 4, head_dim, 1, 640)
    try:
        attend(query, key, value, scale=SCALE, backends=[name])
    except BackendError as error:
        pytest.skip(str(error))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            attend(query, key, value, scale=SCALE, backends=[name])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(query, key, value, scale=SCALE, backends=[name])
    for part in (query, key, value):
        part.copy_(torch.randn_like(part))
    graph.replay()
    torch.cuda.synchronize()
    fresh = attend(query, key, value, scale=SCALE, backends=[name])
    assert torch.equal(captured.out, fresh.out)
    assert (captured.lse - fresh.lse).abs().max() <= 2e-6  # cuDNN's differ in the last bit at times


def test_arguments_that_do_not_fit_are_refused() -> None:
    query, key, value = tensors("cpu", torch.float32, 2, 16, 3, 5)
    with pytest.raises(ShapeError, match="not both"):
        attend(query, key, value, scale=1.0, causal=True, mask=torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(ShapeError, match="do not match"):
        attend(query, key[..., :8], value, scale=1.0)
    with pytest.raises(ShapeError, match="multiple of the 2 key heads"):
        attend(query[:, :3], key, value, scale=1.0)
    with pytest.raises(ShapeError, match="batch, heads"):
        attend(query[0], key, value, scale=1.0)
    with pytest.raises(ShapeError, match="one device"):
        attend(query, key.to("meta"), value, scale=1.0)
    with pytest.raises(ConfigError, match="no-such.*torch-flash"):
        attend(query, key, value, scale=1.0, backends=["no-such"])
