"""The exchange with the host: mistakes in its order fail, nothing waits for ever, and the next replay is right."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from retrieval_attn.cpu import serve
from retrieval_attn.cpu.serve import CallTable
from retrieval_attn.errors import BackendError, CaptureError
from retrieval_attn.gpu.capture import cuda as cuda_module
from retrieval_attn.gpu.capture import polling
from retrieval_attn.gpu.capture.cuda import CudaRuntime, cuda_runtime
from retrieval_attn.gpu.capture.exchange import Replay, Runtime
from retrieval_attn.runner.graph import support
from tests.emulation.runtime import EmulatedRuntime
from tests.gpu.test_decode_kernels import INTERPRETED
from tests.gpu.test_graph import Doubling, device_of
from tests.runner.graph_cases import Decoded, enabled
from tests.waiting import WAIT_SECONDS


class Careless(CallTable):
    """Serves as `serve_calls` does, in Python, but for one `mistake`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.run = self._serve
        self.mistake = ""

    def _serve(self, table: int) -> int:
        assert table == self.table
        head, rows = self.head, self.rows[: self.head[serve.CALLS]]
        generation = int(head[serve.GENERATION])
        numbers = list(range(len(rows)))
        for number in numbers[::-1] if self.mistake == "order" else numbers:
            request, function, argument, answer = rows[number, : serve.ASKED].tolist()
            asked = ctypes.c_int64.from_address(request)
            while asked.value != generation and not (self.mistake == "stale" and asked.value):
                time.sleep(0.001)
            if self.mistake == "skip" and number == 1:
                continue
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
            ctypes.c_int32.from_address(answer).value = generation
        return 0


class Chain:
    """`count` calls, each on the results of the one before: x becomes 2 x + 7. Every replay begins with `given`."""

    def __init__(self, runtime: Runtime, count: int = 3) -> None:
        self.runtime, self.hosts = runtime, [Doubling(runtime) for _ in range(count)]
        device = device_of(runtime)
        self.given, self.out = torch.zeros(3, device=device), torch.zeros(3, device=device)
        runtime.warm_up(self._record)
        self.replay: Any = runtime.capture(self._record)

    def _record(self) -> None:
        x = self.given
        for host in self.hosts:
            host.stage(x)
            begun = self.runtime.begin(host.call)
            beside = x * 0
            self.runtime.join(begun)
            x = host.read() + beside
        self.out.copy_(x)

    def run(self, number: float) -> list[float]:
        self.given.fill_(number)
        self.replay()
        if self.out.device.type != "cuda":
            self.runtime.synchronize()
            return list(self.out.tolist())
        # as the token loop reads: a copy to pageable memory waits inside the driver, and another thread cannot answer
        told = torch.empty(3, pin_memory=True).copy_(self.out, non_blocking=True)
        over = torch.cuda.Event()
        over.record()
        over.synchronize()
        return list(told.tolist())

    def wanted(self, number: float) -> list[float]:
        for _ in self.hosts:
            number = 2 * number + 7
        return [number] * 3

    def check(self, number: float) -> None:
        seen = self.run(number)
        assert self.replay.failure() is None
        assert seen == self.wanted(number)


@pytest.fixture
def careless() -> Chain:
    runtime = EmulatedRuntime(Careless)
    runtime.patience = 0.3
    return Chain(runtime)


def test_a_careful_server_is_right(careless: Chain) -> None:
    for number in range(4):
        careless.check(number)
    assert careless.runtime.calls == 2 * 3 + 4 * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("mistake, lost", [("skip", 1), ("order", 0)])
def test_a_call_that_is_not_answered_in_its_turn_is_reported(careless: Chain, mistake: str, lost: int) -> None:
    """By the device, which gives up and ends the replay; the next one is right."""
    careless.check(1)
    careless.hosts[lost].call.__dict__["name"] = "the lost one"
    careless.replay.server.mistake = mistake
    assert all(number != number for number in careless.run(2))
    assert "the lost one: the device gave up" in careless.replay.failure()
    careless.replay.server.mistake = ""
    careless.check(3)


def test_a_flag_of_an_earlier_replay_is_no_request(careless: Chain) -> None:
    """A server that takes it for one answers before the queries are there."""
    careless.check(1)
    careless.replay.server.mistake, careless.runtime.latency = "stale", 0.2  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match="before it was asked"):
        careless.run(2)


def test_a_number_that_was_used_before_is_an_error(careless: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling.Numbers, "next", lambda self: 5)
    careless.check(1)
    with pytest.raises(CaptureError, match="flags of an earlier replay"):
        careless.run(2)


def test_a_device_that_ends_early_ends_the_serving() -> None:
    """An error in a replayed operation: it surfaces, with nobody waiting for the calls that were not asked."""
    runtime = EmulatedRuntime(CallTable)
    chain = Chain(runtime)
    chain.check(1)

    def fails() -> None:
        raise ZeroDivisionError

    work, chain.replay.work = chain.replay.work, fails
    with pytest.raises(ZeroDivisionError):
        chain.run(2)
    chain.replay.work = lambda: None
    with pytest.raises(BackendError, match="finished without a request.*graph=False"):
        chain.run(2)
    chain.replay.work = work
    chain.check(3)


def test_an_interrupt_at_the_launch_waits_until_the_launched_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = EmulatedRuntime(CallTable)
    chain = Chain(runtime)
    submit = runtime.submit

    def interrupted(*arguments: Any) -> Any:
        futures.append(submit(*arguments))
        raise KeyboardInterrupt

    futures: list[Any] = []
    monkeypatch.setattr(runtime, "submit", interrupted)
    before = runtime.calls
    with pytest.raises(KeyboardInterrupt):
        chain.run(1)
    assert futures[0].result(timeout=WAIT_SECONDS) is None
    assert runtime.calls == before + 3
    monkeypatch.undo()
    chain.check(2)


@pytest.fixture
def broken_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """CUDA devices whose driver has not what an exchange takes. Gives the numbers of the devices that were tried."""
    tried: list[int] = []

    def fail(self: CudaRuntime, device: torch.device, server_of: Any) -> None:
        tried.append(device.index)
        raise BackendError("graphs cannot call the host here: CUDA's driver has no cuStreamQuery")

    monkeypatch.setattr(CudaRuntime, "__init__", fail)
    cuda_module._made_once.cache_clear()
    yield tried
    cuda_module._made_once.cache_clear()


def test_a_device_without_an_exchange_is_tried_once(broken_driver: list[int]) -> None:
    for _ in range(3):
        with pytest.raises(BackendError, match="no cuStreamQuery"):
            cuda_runtime(0, CallTable)
    assert broken_driver == [0]


@torch.no_grad()
def test_without_an_exchange_steps_are_eager_with_one_warning(
    broken_driver: list[int], fresh_decoders: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = enabled("llama")
    monkeypatch.setattr(support, "input_device", lambda model: torch.device("cuda", 0))
    for _ in range(2):
        decoded = Decoded(model, "auto", new=3)
        assert len(decoded.logits) == 4
    warnings = [record.message for record in caplog.records if "decoding eagerly" in record.message]
    assert len(warnings) == 1 and "no cuStreamQuery" in warnings[0]
    with pytest.raises(CaptureError, match='no cuStreamQuery.*graph="auto"'):
        Decoded(model, True, new=1)


# -- on a device ------------------------------------------------------------------------------------------


@pytest.fixture
def cuda() -> CudaRuntime:
    return cuda_runtime(0, CallTable)


@pytest.mark.cuda
def test_a_graph_that_asks_nobody_takes_no_number(cuda: CudaRuntime) -> None:
    """Beside one that does, whose numbers go on."""
    silent, asking = Chain(cuda, 0), Chain(cuda, 2)
    for number in range(3):
        silent.check(number)
        asking.check(number)
    assert silent.replay.generation == 0 < asking.replay.generation


@pytest.mark.cuda
def test_thousands_of_replays_are_right(cuda: CudaRuntime) -> None:
    chain = Chain(cuda, 8)
    for number in range(3000):
        chain.check(number % 64)


RARE_KERNELS = ["hypot", "nextafter", "copysign", "heaviside"]


def _first_launch() -> Any:
    """Of a kernel that nothing else uses: its code is loaded then."""
    numbers, kernel = torch.ones(8, device="cuda"), getattr(torch, RARE_KERNELS.pop())
    return lambda: kernel(numbers, numbers)


def _give_back() -> Any:
    torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    return torch.cuda.empty_cache


def _unregister() -> Any:
    memory, cudart = torch.zeros(1 << 28, dtype=torch.uint8), torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1)) == 0
    return lambda: (cudart.cudaHostUnregister(memory.data_ptr()), memory)


def _register() -> Any:
    memory, cudart = torch.zeros(1 << 30, dtype=torch.uint8), torch.cuda.cudart()
    return lambda: (
        cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1),
        cudart.cudaHostUnregister(memory.data_ptr()),
    )


def _ordinary_copy() -> Any:
    return torch.zeros(1 << 20, device="cuda").cpu


@pytest.mark.cuda
@pytest.mark.parametrize("work", [_first_launch, _give_back, _register, _unregister, _ordinary_copy])
def test_what_a_thread_does_in_the_driver_holds_no_answer_up(work: Any, cuda: CudaRuntime) -> None:
    """Begun while a replay waits for its host; on a stream of its own, as threads beside a read have one."""
    chain = Chain(cuda, 4)
    chain.check(1)
    action, stream = work(), torch.cuda.Stream()

    def act() -> None:
        with torch.cuda.stream(stream):
            action()

    torch.cuda.synchronize()
    thread = threading.Thread(target=act)

    def launched() -> None:
        thread.start()
        time.sleep(0.2)

    chain.given.fill_(2)
    began = time.monotonic()
    chain.replay(launched)
    seconds = time.monotonic() - began
    thread.join()
    assert chain.replay.failure() is None and seconds < 1
    assert chain.out.tolist() == chain.wanted(2)


@pytest.mark.cuda
def test_a_lost_answer_is_reported_in_time(cuda: CudaRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives up, those after it at once; the next replay is right."""
    monkeypatch.setattr(cuda.exchange, "polls", 200_000)
    chain = Chain(cuda, 6)
    chain.check(1)
    elsewhere = torch.zeros(1, dtype=torch.int64)
    server = chain.replay.server
    kept = int(server.rows[2, serve.ANSWER])
    server.rows[2, serve.ANSWER] = elsewhere.data_ptr()
    began = time.monotonic()
    chain.run(2)
    assert time.monotonic() - began < 3
    assert "the device gave up" in chain.replay.failure()
    server.rows[2, serve.ANSWER] = kept
    for number in range(3, 20):
        chain.check(number)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "polls, limit, reason",
    [(40_000_000, 0.5, "no request of the device within 0.5 s"), (100_000, 8.0, "finished without a request")],
)
def test_a_lost_request_is_reported_in_time(
    cuda: CudaRuntime, monkeypatch: pytest.MonkeyPatch, polls: int, limit: float, reason: str
) -> None:
    """The thread gives up and lets the device go; or the device gives up, and the thread sees that it is over."""
    monkeypatch.setattr(cuda.exchange, "polls", polls)
    monkeypatch.setattr(cuda.exchange, "limit_seconds", limit)
    chain = Chain(cuda, 6)
    chain.check(1)
    elsewhere = torch.zeros(1, dtype=torch.int64)
    server = chain.replay.server
    kept = int(server.rows[2, serve.REQUEST])
    server.rows[2, serve.REQUEST] = elsewhere.data_ptr()
    began = time.monotonic()
    with pytest.raises(BackendError, match=reason):
        chain.run(2)
    cuda.synchronize()
    assert time.monotonic() - began < 4
    server.rows[2, serve.REQUEST] = kept
    for number in range(3, 20):
        chain.check(number)


@pytest.mark.cuda
def test_what_was_launched_before_takes_its_time(cuda: CudaRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit for a request does not count it."""
    monkeypatch.setattr(cuda.exchange, "limit_seconds", 0.2)
    chain = Chain(cuda, 2)
    torch.cuda._sleep(2_000_000_000)  # about a second
    chain.check(5)


@pytest.mark.cuda
def test_graphs_of_two_threads_share_a_runtime(cuda: CudaRuntime) -> None:
    """On one stream, which is every thread's default."""
    chains, wrong = [Chain(cuda, 4), Chain(cuda, 5)], []

    def work(chain: Chain) -> None:
        try:
            for number in range(300):
                chain.check(number)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(chain,)) for chain in chains]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not wrong and not any(thread.is_alive() for thread in threads)


@pytest.mark.cuda
def test_a_graph_may_be_captured_while_another_is_used(cuda: CudaRuntime) -> None:
    first = Chain(cuda, 3)
    first.check(1)
    second: Any = Chain(cuda, 4)
    for number in range(50):
        first.check(number)
        second.check(number)


@pytest.mark.cuda
def test_a_graph_without_calls_is_served_without_waiting(cuda: CudaRuntime) -> None:
    given = torch.zeros(3, device="cuda")

    def record() -> None:
        given.add_(1)

    cuda.warm_up(record)
    replay: Replay = cuda.capture(record)
    replay()
    cuda.synchronize()
    assert given.tolist() == [2.0] * 3 and replay.failure() is None


@pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs Triton: a device or its interpreter"
)
def test_kernels_ask_and_wait_by_number() -> None:
    """Another replay's answer is none; the first call that was waited for in vain is reported, once."""
    from retrieval_attn.gpu.capture import flag_triton

    device = "cpu" if INTERPRETED else "cuda"
    words = torch.zeros(3, 32, dtype=torch.int32)
    words[0, 2], words[1:, 1] = 50, torch.arange(2)
    words = words.to(device)
    host = torch.zeros(16, dtype=torch.int64, pin_memory=not INTERPRETED)

    def run(generation: int, answers: list[int]) -> tuple[int, int]:
        words[0, 0], words[1:, 0] = generation, torch.tensor(answers, dtype=torch.int32)
        flag_triton.ask(host[8:], words[0])
        for call in range(2):
            flag_triton.wait(words[call + 1], words[0], host)
        assert int(words[0, 2]) == 50  # copies to the host: everything is over
        assert host[8] == generation
        return divmod(int(host[0]), 1024)

    assert run(7, [7, 7]) == (0, 0)
    assert run(8, [8, 7]) == (8, 1)
    assert run(9, [9, 9]) == (8, 1)
    assert run(10, [9, 9]) == (10, 0)


@pytest.mark.cuda
def test_who_waits_for_the_device_waits_for_captures_of_others(cuda: CudaRuntime) -> None:
    """To wait for a device while a thread captures is an error of CUDA, and breaks the capture."""
    chain, recording, over = Chain(cuda, 2), threading.Event(), threading.Event()
    numbers, waited = torch.zeros(4, device="cuda"), []

    def record() -> None:
        numbers.add_(1)
        recording.set()
        time.sleep(0.3)

    def wait() -> None:
        assert recording.wait(WAIT_SECONDS)
        cuda.synchronize()
        waited.append(over.is_set())

    thread = threading.Thread(target=wait)
    thread.start()
    replay = cuda.capture(record)
    over.set()
    thread.join(WAIT_SECONDS)
    assert waited == [True]
    replay()
    cuda.synchronize()
    assert numbers.tolist() == [1] * 4
    chain.check(1)
