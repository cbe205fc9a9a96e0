"""Drawing on a GPU: the kernel, the operations of torch, and graphs of both choose what a CPU chooses.

Triton's own interpreter runs the kernel on a CPU: TRITON_INTERPRET=1 pytest tests/engine/test_draw_kernel.py
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from retrieval_attn.sampling import sampler as module
from retrieval_attn.sampling.sampler import DrawMode, Sampler
from retrieval_attn.sampling.sampling_params import SamplingParams
from tests.gpu.test_decode_kernels import INTERPRETED

EVERYTHING = DrawMode(sample=True, filters=True, logprobs=5)


@pytest.fixture(
    params=[
        pytest.param("torch", marks=pytest.mark.cuda),
        pytest.param("triton", marks=() if INTERPRETED else pytest.mark.cuda),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the tensors lie; "triton" means the kernel on a GPU, or interpreted."""
    if request.param == "torch":
        monkeypatch.setattr(module, "_kernels", lambda logits: None)
    elif INTERPRETED:
        from retrieval_attn.gpu import draw_triton

        monkeypatch.setattr(module, "_kernels", lambda logits: draw_triton)
    yield "cuda" if request.param == "torch" or not INTERPRETED else "cpu"


def on_cpu(logits: Tensor, draws: list[SamplingParams], positions: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The ids that operations of torch choose on the CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "_kernels", lambda logits: None)
        return filled(draws, "cpu").choose(logits, positions).ids


def filled(draws: list[SamplingParams], device: str) -> Sampler:
    made = Sampler(len(draws), device)
    made.assign(dict(enumerate(draws)))
    return made


def some_draw(pick: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=pick.choice([0.0, 0.3, 1.0, 2.5]),
        top_k=pick.choice([0, 0, 1, 7, 50, 8000]),
        top_p=pick.choice([1.0, 1.0, 0.9, 0.3, 0.05]),
        min_p=pick.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        seed=pick.randrange(2**64),
    )


@pytest.mark.parametrize("vocabulary", [1, 7, 333, 9001, pytest.param(128_256, marks=pytest.mark.cuda)])
@pytest.mark.parametrize("kind", ["plain", "ties", "ruled out", "failed"])
def test_it_chooses_what_the_cpu_chooses(
    device: str, vocabulary: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pick = random.Random(f"{vocabulary} {kind}")
    generator = torch.Generator().manual_seed(vocabulary)
    for rows in (1, 5) if device == "cpu" else (1, 5, 33, 64):
        logits = torch.randn(rows, vocabulary, generator=generator) * pick.choice([0.5, 3.0, 8.0])
        if kind == "ties":
            logits = (logits * 2).round() / 2
        if kind == "ruled out":
            logits[:, 1:][torch.rand(rows, vocabulary - 1, generator=generator) < 0.5] = -math.inf
        if kind == "failed":
            logits[0, pick.randrange(vocabulary)] = math.nan
        draws = [some_draw(pick) for _ in range(rows)]
        positions = torch.tensor([pick.randrange(2**40) for _ in range(rows)])
        expected = on_cpu(logits, draws, positions, monkeypatch)
        found = filled(draws, device).choose(logits.to(device), positions.to(device), mode=EVERYTHING)
        assert found.ids.tolist() == expected.tolist(), draws
        assert found.failed.tolist() == [kind == "failed" and row == 0 for row in range(rows)]
        again = filled(draws, device).choose(logits.to(device), positions.to(device), mode=EVERYTHING)
        assert torch.equal(found.ids, again.ids)


def test_numbers_that_lie_close_or_far_apart_end_the_search(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The range of a threshold is halved: the last two numbers in it may be neighbours, or equal."""
    near = torch.tensor([1.0]).view(torch.int32) + torch.arange(300, dtype=torch.int32)
    cases = [
        near.view(torch.float32),
        torch.cat([torch.tensor([1e38, -1e38, 0.0, 1e-45, -1e-45]), torch.linspace(-1e30, 1e30, 100)]),
        torch.zeros(50),
        torch.logspace(-40, 20, 200),
    ]
    for row in cases:
        logits = row[torch.randperm(len(row), generator=torch.Generator().manual_seed(0))][None].contiguous()
        for draw in (SamplingParams(temperature=1.0, top_k=9), SamplingParams(temperature=1.0, top_p=0.5, top_k=40)):
            position = torch.tensor([3])
            found = filled([draw], device).choose(logits.to(device), position.to(device))
            assert found.ids.tolist() == on_cpu(logits, [draw], position, monkeypatch).tolist()


@pytest.mark.cuda
@pytest.mark.parametrize("mode", [DrawMode(), DrawMode(True), EVERYTHING])
def test_a_captured_graph_serves_rows_that_come_and_go(
    device: str, mode: DrawMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph reads tables, logits and positions from where they were; each replay chooses as a CPU does."""
    if device == "cpu":
        pytest.skip("a graph needs a GPU; this is the interpreted kernel")
    pick, rows, vocabulary = random.Random(1), 6, 1000
    sampler = Sampler(rows, device)
    logits = torch.zeros(rows, vocabulary, device=device)
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    sampler.choose(logits, positions, mode=mode)  # what is made once is made outside
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        found = sampler.choose(logits, positions, mode=mode)
    draws = [SamplingParams()] * rows
    for step in range(12):
        for slot in pick.sample(range(rows), 3):
            draws[slot] = some_draw(pick) if mode.filters else SamplingParams(temperature=float(mode.sample), seed=step)
        sampler.assign(dict(enumerate(draws)))
        now = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(step)) * 3
        now[step % rows, 3] = math.nan if step % 2 else 0.0
        place = torch.arange(rows) + step
        logits.copy_(now)
        positions.copy_(place)
        graph.replay()
        assert found.ids.tolist() == on_cpu(now, draws, place, monkeypatch).tolist()
        assert found.failed.tolist() == [bool(step % 2) and row == step % rows for row in range(rows)]
        if mode.logprobs is not None:
            assert found.logprobs is not None and found.top_logprobs is not None
            whole = now.double().log_softmax(dim=1)
            fine = [row for row in range(rows) if not (step % 2 and row == step % rows)]
            expected = whole.gather(1, found.ids.cpu()[:, None]).squeeze(1)
            assert (found.logprobs.cpu() - expected)[fine].abs().max() < 1e-5
            assert (found.top_logprobs.cpu() - whole.topk(5, dim=1).values)[fine].abs().max() < 1e-5


@pytest.mark.cuda
def test_a_row_on_a_gpu_chooses_the_same_in_any_batch(device: str) -> None:
    """Bit for bit: ids and logprobs, of 40 rows alone and together, in two orders."""
    if device == "cpu":
        pytest.skip("the interpreted kernel has no batch sizes of its own")
    pick = random.Random(2)
    draws = [some_draw(pick) for _ in range(40)]
    logits = torch.randn(40, 128_256, generator=torch.Generator().manual_seed(2)).to(device) * 3
    positions = torch.arange(40, device=device)
    together = filled(draws, device).choose(logits, positions, mode=EVERYTHING)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    shuffled = filled([draws[row] for row in order.tolist()], device).choose(
        logits[order.to(device)], order.to(device), mode=EVERYTHING
    )
    assert torch.equal(shuffled.ids, together.ids[order.to(device)])
    assert together.logprobs is not None and shuffled.logprobs is not None
    assert torch.equal(shuffled.logprobs, together.logprobs[order.to(device)])
    for row in range(40):
        alone = filled([draws[row]], device).choose(logits[row : row + 1], positions[row : row + 1], mode=EVERYTHING)
        assert int(alone.ids) == int(together.ids[row])
        assert alone.logprobs is not None and torch.equal(alone.logprobs[0], together.logprobs[row])
