"""Which backend is chosen and why, what each refuses, and the arguments of kernels that need a device.

The registry is the real one. Calls for CUDA kernels are made of meta tensors: PyTorch's own operators then
check arguments and compute shapes without a device.
"""

from __future__ import annotations

import logging

import pytest
import torch

from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.attention import flash
from retrieval_attn.gpu.attention.flash import BACKENDS, Call, _function, attend

GPU_NAMES = [name for name in BACKENDS if name not in ("torch-flash-cpu", "math")]


def call(
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    *,
    value_dim: int | None = None,
    queries: int = 40,
    causal: bool = False,
    mask: bool = False,
    softcap: float | None = None,
) -> Call:
    """2 rows, 8 query heads over 2 key heads, 100 keys, on the meta device."""
    query = torch.empty(2, 8, queries, head_dim, dtype=dtype, device="meta")
    key = torch.empty(2, 2, 100, head_dim, dtype=dtype, device="meta")
    value = torch.empty(2, 2, 100, value_dim or head_dim, dtype=dtype, device="meta")
    hidden = torch.empty(2, 1, queries, 100, dtype=torch.bool, device="meta") if mask else None
    return Call(query, key, value, 0.1, causal, hidden, softcap)


@pytest.mark.parametrize(
    ("made", "serve"),
    [
        (call(), set(GPU_NAMES)),
        (call(torch.float16, 64, causal=True), set(GPU_NAMES)),
        (call(head_dim=256), {"flash-attn-4", "flash-attn", "torch-flash", "torch-efficient"}),
        (call(head_dim=320), {"torch-efficient"}),
        (call(head_dim=100), set()),
        (call(torch.float32), {"torch-efficient"}),
        (call(torch.float64), set()),
        (call(torch.float8_e4m3fn), set()),
        (call(value_dim=64), {"torch-efficient"}),
        (call(mask=True), {"torch-efficient"}),
        (call(softcap=30.0), {"flash-attn-4", "flash-attn"}),
        (call(softcap=30.0, mask=True), set()),
    ],
)
def test_each_kernel_serves_what_it_can(made: Call, serve: set[str]) -> None:
    """A kernel that is asked for what it cannot do says so in words; math takes all of it."""
    reasons = {name: BACKENDS[name].refuse(made) for name in GPU_NAMES}
    assert {name for name, reason in reasons.items() if reason is None} == serve
    assert all(reason is None or reason.startswith(("needs ", "takes ")) for reason in reasons.values())
    assert BACKENDS["math"].refuse(made) is None


SHAPES = {
    "plain": call(),
    "decode": call(queries=1),
    "causal": call(causal=True),
    "mask": call(mask=True),
    "64": call(head_dim=64),
}


@pytest.mark.parametrize(
    ("name", "made"),
    [
        pytest.param(name, made, id=f"{name}-{shape}")
        for name in ("torch-flash", "torch-cudnn", "torch-efficient")
        for shape, made in SHAPES.items()
        if BACKENDS[name].refuse(made) is None
    ],
)
def test_operators_take_the_arguments_they_are_given(name: str, made: Call) -> None:
    """Fails when PyTorch changes an operator's signature or the shape of its lse."""
    part = BACKENDS[name].run(made)
    assert part.out.shape == made.query.shape and part.out.dtype == torch.float32
    assert part.lse.shape == made.query.shape[:3] and part.lse.dtype == torch.float32


def test_the_choice_and_its_reasons_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    flash._log_choice.cache_clear()
    query, key = torch.zeros(1, 2, 3, 16), torch.zeros(1, 1, 4, 16)
    with caplog.at_level(logging.INFO, logger="retrieval_attn.gpu.attention.flash"):
        for _ in range(3):
            attend(query, key, key, scale=1.0)
        assert len(caplog.records) == 1
        message = caplog.records[0].getMessage()
        assert "backend torch-flash-cpu for cpu torch.float32 head_dim 16" in message
        assert all(f"{name}: needs a CUDA device" in message for name in GPU_NAMES)
        attend(query, key, key, scale=1.0, softcap=2.0)
    assert len(caplog.records) == 2
    assert "backend math" in caplog.records[1].getMessage()
    assert "torch-flash-cpu: takes no soft-cap" in caplog.records[1].getMessage()


def test_nobody_serves_integers_and_every_reason_is_told() -> None:
    query = torch.ones(1, 2, 3, 16, dtype=torch.int32)
    with pytest.raises(BackendError) as caught:
        attend(query, query, query, scale=1.0)
    message = str(caught.value)
    assert all(f"{name}: needs " in message for name in BACKENDS)
    assert "(1, 2, 3, 16) torch.int32 on cpu" in message and "Use float32, bfloat16 or float16" in message


def test_a_head_size_that_the_named_backend_refuses_is_an_error() -> None:
    query, value = torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 8)
    with pytest.raises(BackendError, match="torch-flash-cpu: needs one head_dim, got 16 and 8"):
        attend(query, query, value, scale=1.0, backends=["torch-flash-cpu"])
    assert attend(query, query, value, scale=1.0).out.shape == (1, 2, 3, 8)


def test_the_order_asked_for_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    flash._log_choice.cache_clear()
    query = torch.zeros(1, 2, 3, 16)
    with caplog.at_level(logging.INFO, logger="retrieval_attn.gpu.attention.flash"):
        attend(query, query, query, scale=1.0, backends=["math", "torch-flash-cpu"])
    assert "backend math for cpu" in caplog.text and "first choice" in caplog.text


def test_a_missing_package_is_named() -> None:
    """The reason is what a user needs to install, and a broken package's own words."""
    assert "No module named 'no_such_attention_package'" in str(_function("no_such_attention_package", "attend"))
    assert str(_function("json", "no_such_function")).startswith("json.no_such_function cannot be imported")
    assert callable(_function("json", "dumps"))


@pytest.mark.parametrize("name", GPU_NAMES)
def test_device_kernels_are_missing_on_the_cpu(name: str) -> None:
    assert BACKENDS[name].missing(torch.device("cpu")) == "needs a CUDA device, the tensors are on cpu"
    if not torch.cuda.is_available():
        assert BACKENDS[name].missing(torch.device("cuda:0")) == "needs a CUDA device, PyTorch sees none"


@pytest.mark.cuda
def test_the_device_has_a_flash_kernel() -> None:
    """On a device from Ampere on, half precision never falls to score matrices; packages may be absent."""
    assert BACKENDS["torch-flash"].missing(torch.device("cuda")) is None
    for name in ("flash-attn", "flash-attn-4"):
        reason = BACKENDS[name].missing(torch.device("cuda"))
        assert reason is None or f"package {name}" in reason or "compute capability" in reason
    query = torch.zeros(1, 2, 3, 128, dtype=torch.bfloat16, device="cuda")
    attend(query, query, query, scale=1.0, causal=True, backends=[name for name in BACKENDS if name != "math"])


def test_long_calls_ask_cudnn_first_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill's chunks on a Hopper GPU; not a token's call, another device, or backends that were asked for by name."""
    long, short = call(queries=2048), call(queries=16)
    assert flash._ordered(long, BACKENDS) == list(BACKENDS)  # no CUDA device
    monkeypatch.setattr(flash, "prefers_cudnn", lambda call: True)
    assert flash._ordered(long, BACKENDS)[0] == "torch-cudnn"
    assert sorted(flash._ordered(long, BACKENDS)) == sorted(BACKENDS)
    assert flash._ordered(short, BACKENDS) == list(BACKENDS)
    assert flash._ordered(long, ["math", "torch-cudnn"]) == ["math", "torch-cudnn"]


@pytest.mark.parametrize("causal", [False, True])
def test_a_kernel_that_plans_is_called_with_few_shapes(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """PyTorch makes a plan for each shape: chunks of prompts differ in their queries and in the keys before them.

    One key per "piece" of 16, 64 and 256 in place of thousands, so that a CPU attends quickly.
    """
    monkeypatch.setattr(flash, "PLANNED_KEYS", (256, 64, 16))
    shapes = set[tuple[int, int, bool]]()

    def run(call: Call) -> flash.Partial:
        shapes.add((call.queries, call.keys, call.causal))
        assert not call.causal or call.queries == call.keys, "the mask of such a kernel is aligned top-left"
        return flash._run_math(call)

    attended, chance = flash._planned(run), torch.Generator().manual_seed(5)
    for past in (*range(0, 700, 37), 64, 320):
        for queries in (17, 24, 32, 50):
            query = torch.randn(1, 4, queries, 8, generator=chance)
            key, value = torch.randn(2, 1, 2, past + queries, 8, generator=chance).unbind()
            made = Call(query, key, value, 0.3, causal)
            right, found = flash._run_math(made), attended(made)
            torch.testing.assert_close(found.out, right.out, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(found.lse, right.lse, atol=1e-5, rtol=1e-5)
    assert len(shapes) <= 2 * (3 + causal)  # queries of 32 and 64; keys of three pieces, and the diagonal
