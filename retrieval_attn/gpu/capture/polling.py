"""The exchange of a graph with the host: a kernel requests, the thread that launched the replay answers.

A kernel writes a layer's queries to page-locked memory, then the replay's number to the call's request word there. The
thread runs the search, which leaves its results in page-locked memory, and writes the replay's number to the call's
answer word there. A kernel polls that word before the merge, and a kernel behind it fetches the results. It gives up
after POLLS and reports the call; the thread gives up after LIMIT_SECONDS and then answers all calls that are left.
Neither waits for ever.

The thread that answers calls no driver. A driver lets one thread in at a time: while another one is in it and waits for
the device (a kernel's code is loaded at its first launch, memory is given back), an answer by the driver would wait for
that thread, which waits for this replay.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from retrieval_attn.compile.cache_dir import use_triton_folder
from retrieval_attn.compile.gc_pause import no_gc
from retrieval_attn.errors import BackendError, CaptureError
from retrieval_attn.gpu.capture.exchange import REPORT_SHIFT, HostCall, Replay, Shared, page_locked
from retrieval_attn.gpu.decode.kernels import load_launchers_in_turn


class DriverFunctions:
    """Addresses of functions of CUDA's driver."""

    def __init__(self) -> None:
        """Raises BackendError if there is no driver."""
        tried = []
        for name in [*_loaded("libcuda.so"), "libcuda.so.1"]:
            try:
                self._library = ctypes.CDLL(name)
                return
            except OSError as error:
                tried.append(f"{name}: {error}")
        raise BackendError(
            f"a CUDA graph with host attention needs the CUDA driver, which cannot be loaded: {'; '.join(tried)}"
        )

    def address(self, name: str) -> int:
        """Address of the function `name`. Raises BackendError if there is none."""
        function = getattr(self._library, name, None)
        address = None if function is None else ctypes.cast(function, ctypes.c_void_p).value
        if address is None:
            raise BackendError(
                f"a CUDA graph with host attention needs {name}, which this CUDA driver lacks; install a newer driver"
            )
        return address


def _loaded(name: str) -> list[str]:
    """Files of this process whose names begin with `name`: a second copy of a runtime would know no stream of ours."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = [line.split(maxsplit=5)[5] for line in lines if "/" in line]
    return list(dict.fromkeys(path for path in paths if Path(path).name.startswith(name)))


MAX_CALLS = 512
"""Host calls of one graph."""
POLLS = 20_000_000
"""Loads of an answer word before a kernel gives up, for a host that is busy. Half a microsecond each would be ten
seconds; steps that were given up on an H100 took some three in all, so one takes .16 there."""
LIMIT_SECONDS = 10.0
"""How long the thread waits for a request."""
HOST_LINE, DEVICE_LINE = 8, 32  # words of 64 and 32 bits: flags lie on cache lines of their own
HINT = "Use graph=False to decode without this exchange"


class Functions(NamedTuple):
    """Addresses of C functions that return int32, 0 if all work is done: the driver's, or an emulation's."""

    query_stream: int
    query_event: int


class Server(Protocol):
    """Server of the calls of one graph: `cpu/serve.py` implements it."""

    table: int

    @property
    def run(self) -> Callable[[int], int]: ...

    def add(self, *, request: int, function: int, argument: int, answer: int) -> None: ...

    def prepare(self, generation: int, stream: int, event: int) -> None: ...

    @property
    def served(self) -> int: ...

    def spent(self, number: int) -> str: ...


ServerOf = Callable[[tuple[int, int], float], Server]
"""Makes one of Functions and the longest wait for a request in seconds."""


def serve(server: Server, launch: Callable[[], None], calls: Sequence[HostCall], limit_seconds: float) -> None:
    """Launch a replay whose server is prepared, and serve it. Raises BackendError that names the call.

    An interrupt that comes before the launched work is served waits until it is.
    """
    run, table = server.run, server.table
    interrupt = None
    try:
        launch()
    except KeyboardInterrupt as error:  # before or after the launch: `run` finds out
        interrupt = error
    code = run(table)
    if interrupt is not None:
        raise interrupt
    if code:
        reasons = {
            -1: f"no request of the device within {limit_seconds:g} s",
            -2: "the device finished without a request",
        }
        reason = reasons.get(code, f"CUDA error {code}")
        raise BackendError(f"{calls[server.served].name}: {reason}. {HINT}.")


def failure_of(report: int, generation: int, calls: Sequence[HostCall], server: Server) -> str | None:
    """Return the failure in the report of replay `generation`, the last that `server` served; None without one."""
    if report // REPORT_SHIFT != generation:
        return None
    number = report % REPORT_SHIFT
    return (
        f"{calls[number].name}: the device gave up waiting for the host's answer, so this token is lost "
        f"({server.spent(number)}). {HINT}."
    )


class Numbers:
    """Numbers of replays, 1 .. 2**31 - 1, each once per process: no flag of an earlier replay is this one's."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def next(self) -> int:
        """The next number. Safe from any thread."""
        return next(self._count) % (2**31 - 1) + 1


def load_flags(device: torch.device) -> Any:
    """The kernels that ask, wait and fetch, compiled and loaded: loading may wait for a device, which must not wait for
    us then. Raises ImportError or what Triton raises.
    """
    use_triton_folder()
    load_launchers_in_turn()
    from retrieval_attn.gpu.capture import flag_triton

    words = torch.zeros(DEVICE_LINE, dtype=torch.int32, device=device)
    host = page_locked(2 * HOST_LINE, torch.int64)
    flag_triton.ask(host[HOST_LINE:], words)
    flag_triton.wait(page_locked(DEVICE_LINE, torch.int32), words, host)
    answers, room = page_locked(DEVICE_LINE), torch.zeros(DEVICE_LINE, device=device)
    for count in DEVICE_LINE, DEVICE_LINE - 1:  # Triton compiles for multiples of 16, and for other numbers
        flag_triton.fetch(answers[:count], room[:count])
    torch.cuda.synchronize(device)  # before this memory may be taken again
    return flag_triton


class PollingExchange:
    """See the module. polls, limit_seconds: POLLS and LIMIT_SECONDS of graphs that are captured from now on.

    turn: held while a graph's calls are served.
    """

    def __init__(self, device: torch.device, server_of: ServerOf) -> None:
        """Raises BackendError, ImportError or what Triton raises where a part of it is missing."""
        self.device, self._server_of = device, server_of
        self.polls, self.limit_seconds = POLLS, LIMIT_SECONDS
        self.numbers, self.turn = Numbers(), threading.Lock()
        driver = DriverFunctions()
        self._functions = Functions(driver.address("cuStreamQuery"), driver.address("cuEventQuery"))
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # there is a context
            self.kernels = load_flags(device)

    def server(self) -> Server:
        """A new one, without calls."""
        return self._server_of(self._functions, self.limit_seconds)

    def queries(self, count: int) -> Shared:
        """Memory that the device writes and the host reads, zeros: the host's. Raises CaptureError."""
        host = page_locked(count)
        return Shared(host, host)

    def results(self, count: int) -> Shared:
        """The same for the other direction: the device has its own, which kernels fetch from the host's."""
        return Shared(torch.zeros(count, dtype=torch.float32, device=self.device), page_locked(count))

    def run(self, call: HostCall) -> None:
        """Make a call of work that is not captured. It is over when this returns."""
        torch.cuda.current_stream(self.device).synchronize()  # the queries have arrived in the host's memory
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call.function)(call.argument)
        call.results.device.copy_(call.results.host)


class PollingCalls:
    """The calls of a graph that is being captured. server: will answer them."""

    def __init__(self, exchange: PollingExchange) -> None:
        self.exchange = exchange
        self.server = exchange.server()
        self.calls: list[HostCall] = []
        self._host = page_locked((MAX_CALLS + 1) * HOST_LINE, torch.int64)  # the report, then requests
        # see flag_triton: what all kernels look at, on the device; and where they poll, a line of the host's memory for
        # each call, so that no poll slows another call's answer
        head = torch.zeros(DEVICE_LINE, dtype=torch.int32)
        head[2] = exchange.polls
        self._head = head.to(exchange.device)
        self._lines = page_locked(MAX_CALLS * DEVICE_LINE, torch.int32).view(MAX_CALLS, DEVICE_LINE)
        self._lines[:, 1] = torch.arange(MAX_CALLS)

    def begin(self, call: HostCall) -> int:
        number = len(self.calls)
        if number == MAX_CALLS:
            raise CaptureError(f"a captured step can have at most {MAX_CALLS} layers that search on the host")
        self.calls.append(call)
        request = self._host[(number + 1) * HOST_LINE :]
        self.server.add(
            request=request.data_ptr(),
            function=call.function,
            argument=call.argument,
            answer=self._lines[number].data_ptr(),
        )
        self.exchange.kernels.ask(request, self._head)
        return number

    def join(self, begun: int) -> None:
        self.exchange.kernels.wait(self._lines[begun], self._head, self._host)
        results = self.calls[begun].results
        self.exchange.kernels.fetch(results.host, results.device)

    def replay(self, launch: Callable[[], None]) -> Replay:
        return PollingReplay(self, launch, (self._head, self._host, self._lines))


class PollingReplay:
    """A captured graph whose calls the thread that launches it serves."""

    def __init__(self, calls: PollingCalls, launch: Callable[[], None], flags: tuple[Tensor, Tensor, Tensor]) -> None:
        """flags: of `PollingCalls`, on the device and the host, and where answers are written."""
        self._exchange, self._launch = calls.exchange, launch
        self.server, self.calls = calls.server, calls.calls
        self._flags = flags  # kept: the graph and the server use them by address
        self._number = flags[0][0]
        self._report = flags[1].numpy()[:1]
        self._begun = torch.cuda.Event()
        self.generation = 0

    def __call__(self, launched: Callable[[], None] | None = None) -> None:
        def launch() -> None:
            self._launch()
            if launched is not None:
                launched()

        # by one thread at a time: a launch may wait for a graph under way, which could then not be answered
        with self._exchange.turn, torch.cuda.device(self._exchange.device), no_gc():
            if not self.calls:  # as where the device reads all that it names: no kernel looks at a number
                launch()
                return
            stream = torch.cuda.current_stream()
            self.generation = self._exchange.numbers.next()
            # in the stream before the graph: its kernels read the number there
            self._number.fill_(self.generation)
            # the server measures a request's delay from here on, not while earlier work holds the stream
            self._begun.record(stream)
            self.server.prepare(self.generation, stream.cuda_stream, self._begun.cuda_event)
            serve(self.server, launch, self.calls, self._exchange.limit_seconds)

    def failure(self, generation: int | None = None) -> str | None:
        if not self.calls:
            return None
        return failure_of(int(self._report[0]), generation or self.generation, self.calls, self.server)
