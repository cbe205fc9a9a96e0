"""Recording and replaying: the emulation does what a graph does, and refuses what a capture refuses."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from torch import Tensor

from retrieval_attn.cpu.serve import CallTable
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.capture import polling as libraries
from retrieval_attn.gpu.capture.cuda import CudaRuntime, cuda_runtime
from retrieval_attn.gpu.capture.exchange import HostCall, Runtime
from retrieval_attn.gpu.decode.kernels import HostResult, Parts, merge_parts, stage_queries
from tests.emulation.runtime import EmulatedRuntime

AnyRuntime = EmulatedRuntime | CudaRuntime


@pytest.fixture
def emulated() -> EmulatedRuntime:
    return EmulatedRuntime(CallTable)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def runtime(request: pytest.FixtureRequest, emulated: EmulatedRuntime) -> AnyRuntime:
    return emulated if request.param == "emulated" else cuda_runtime(0, CallTable)


def device_of(runtime: Runtime) -> str:
    return "cpu" if isinstance(runtime, EmulatedRuntime) else "cuda"


def test_replays_read_and_write_the_same_memory(runtime: Runtime) -> None:
    """Views, operations in place, results of results; a number from Python is frozen at its first value."""
    device = device_of(runtime)
    given, out, counter = torch.zeros(4, device=device), torch.zeros(2, 2, device=device), [0]

    def record() -> None:
        counter[0] += 1
        square = given.view(2, 2) * given.view(2, 2).t()
        square[0] += 1
        pair = torch.cat([square, square.exp()]).sum(dim=0)
        out.copy_(pair + counter[0])

    runtime.warm_up(record)
    replay = runtime.capture(record)
    for seed in range(3):
        numbers = torch.randn(4, generator=torch.Generator().manual_seed(seed)).to(device)
        given.copy_(numbers)
        replay()
        runtime.synchronize()
        square = numbers.view(2, 2) * numbers.view(2, 2).t()
        square = square + torch.tensor([[1.0], [0.0]], device=device)
        expected = (square + square.exp()).sum(dim=0) + 2
        torch.testing.assert_close(out, expected.expand(2, 2))
    assert counter == [2]


class Doubling:
    """A host call that returns twice its three queries plus 7, and what stages and reads them on the device."""

    def __init__(self, runtime: Runtime) -> None:
        self.threads: set[int] = set()
        self.queries, self.results = runtime.queries(3), runtime.results(4)
        taken, given = self.queries.host.numpy(), self.results.host.numpy()

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def double(argument: int) -> None:
            self.threads.add(threading.get_ident())
            given[:3] = 2 * taken + argument

        self._function = double
        address = ctypes.cast(double, ctypes.c_void_p).value
        assert address is not None
        self.call = HostCall(self.queries, self.results, address, 7)
        device = device_of(runtime)
        self._none = Parts(torch.zeros(1, 1, 1, 3, device=device), torch.full((1, 1, 1), -torch.inf, device=device))

    def stage(self, numbers: Tensor) -> None:
        stage_queries(numbers.view(1, 1, 1, 3), self.queries.device.view(1, 3), None)

    def read(self) -> Tensor:
        """As one head's part, with lse 0, merged with nothing."""
        part = HostResult(self.results.device[:3].view(1, 3), self.results.device[3:])
        return merge_parts(self._none, part, None, torch.float32).view(3)


def test_host_functions_are_part_of_replays(runtime: AnyRuntime) -> None:
    """Called once per replay by the launching thread; what follows sees the results."""
    device, host = device_of(runtime), Doubling(runtime)
    given, out = torch.zeros(3, device=device), torch.zeros(3, device=device)

    def record() -> None:
        given.add_(1)
        host.stage(given)
        begun = runtime.begin(host.call)
        beside = given * 10
        runtime.join(begun)
        out.copy_(host.read() + beside)

    runtime.warm_up(record)
    replay = runtime.capture(record)
    given.zero_()
    for step in range(1, 4):
        replay()
        runtime.synchronize()
        assert out.tolist() == [12.0 * step + 7] * 3 and replay.failure() is None
    assert host.threads == {threading.get_ident()}


def test_results_before_the_join_are_wrong(emulated: EmulatedRuntime) -> None:
    """The emulation shows what a graph would only do now and then."""
    runtime, out, staged = emulated, torch.zeros(3), torch.zeros(3)
    host = Doubling(runtime)

    def early() -> None:
        host.stage(staged.add_(1))
        begun = runtime.begin(host.call)
        out.copy_(host.read())
        runtime.join(begun)

    runtime.warm_up(early)
    assert out.isnan().all()
    replay = runtime.capture(early)
    out.zero_()
    replay()
    assert out.isnan().all()


def test_queries_written_after_the_call_began_are_an_error(emulated: EmulatedRuntime) -> None:
    runtime, staged = emulated, torch.zeros(3)
    host = Doubling(runtime)

    def late() -> None:
        begun = runtime.begin(host.call)
        host.stage(staged)
        runtime.join(begun)

    replay = runtime.capture(late)
    replay()
    staged.add_(1)
    with pytest.raises(CaptureError, match="queries were written"):
        replay()


def test_reading_a_value_ends_the_capture(runtime: Runtime) -> None:
    """And the next capture, and random numbers, work as before."""
    device = device_of(runtime)
    given, out = torch.ones(4, device=device), torch.zeros(4, device=device)

    def reads() -> None:
        out.copy_(given + (1 if float(given[0]) > 0 else 0))

    def masks() -> None:
        out.copy_(given[given > 0])

    for record in (reads, masks):
        runtime.warm_up(record)
        with pytest.raises(CaptureError):
            runtime.capture(record)
    torch.multinomial(given, 1)

    def fine() -> None:
        out.copy_(given * 3)

    runtime.warm_up(fine)
    replay = runtime.capture(fine)
    given.fill_(5)
    replay()
    runtime.synchronize()
    assert out.tolist() == [15.0] * 4


def test_an_error_of_the_model_while_recording_is_the_reason(runtime: Runtime) -> None:
    def record() -> None:
        raise ZeroDivisionError("by the model")

    with pytest.raises(CaptureError, match="ZeroDivisionError: by the model"):
        runtime.capture(record)


def test_loaded_libraries_are_found_by_name() -> None:
    """A second copy of a CUDA library would know no stream of torch's."""
    found = libraries._loaded("libtorch_cpu")
    assert len(found) == 1 and found[0].startswith("/") and libraries._loaded("libnot-loaded") == []


def test_pairs_of_views_share_memory() -> None:
    """A view of an input is no result of its own: it shows what the replay wrote."""
    runtime, given = EmulatedRuntime(CallTable), torch.zeros(2, 3)
    shown: list[Tensor] = []
    replay = runtime.capture(lambda: shown.append(given.add_(1).t()[1:]))
    replay()
    assert shown[0].tolist() == [[2.0, 2.0], [2.0, 2.0]]
