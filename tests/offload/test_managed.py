"""Host memory that CUDA manages: on a GPU what threads take and devices read; elsewhere what is asked of the driver."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from retrieval_attn.offload import managed
from retrieval_attn.offload.managed import managed_bytes

CONTEXT = 77


class Driver:
    """Does what the driver does with memory of the test, and notes the calls; `refuses` names a function that fails."""

    def __init__(self, refuses: str, concurrent: int) -> None:
        self.refuses, self.concurrent = refuses, concurrent
        self.current: list[int] = []
        self.held: dict[int, Any] = {}
        self.advice: list[tuple[int, int]] = []

    def _answer(self, name: str) -> int:
        return 2 if name == self.refuses else 0

    def cuDeviceGet(self, there: Any, number: int) -> int:
        there._obj.value = number
        return self._answer("cuDeviceGet")

    def cuDeviceGetAttribute(self, value: Any, attribute: int, there: Any) -> int:
        assert attribute == 89
        value._obj.value = self.concurrent
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, there: Any) -> int:
        context._obj.value = CONTEXT
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.current.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self.current.pop()
        return 0

    def cuCtxGetDevice(self, there: Any) -> int:
        there._obj.value = 3
        return 0

    def cuMemAllocManaged(self, address: Any, size: Any, flags: int) -> int:
        assert self.current == [CONTEXT] and flags == 1
        if failed := self._answer("cuMemAllocManaged"):
            return failed
        memory = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(memory)
        self.held[address._obj.value] = memory
        return 0

    def cuMemAdvise(self, address: Any, size: Any, advice: int, where: Any) -> int:
        self.advice.append((advice, getattr(where, "value", where)))
        return self._answer(f"cuMemAdvise {advice}")

    def cuMemFree_v2(self, address: Any) -> int:
        assert self.current == [CONTEXT]
        del self.held[address.value]
        return 0


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No test knows what another one's driver said."""
    for function in (managed._context, managed._driver, managed._say):
        function.cache_clear()
    yield
    for function in (managed._context, managed._driver, managed._say):
        function.cache_clear()


def with_driver(monkeypatch: pytest.MonkeyPatch, refuses: str = "", concurrent: int = 1) -> Driver:
    driver = Driver(refuses, concurrent)
    monkeypatch.setattr(managed, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return driver


def test_kept_on_the_host_and_given_back_with_the_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = with_driver(monkeypatch)
    array = managed_bytes(1000, torch.device("cuda", 1))
    assert array is not None and (array.shape, array.dtype) == ((1000,), np.uint8)
    assert driver.advice == [(3, -1), (5, 3)], "pages stay on the host, the device maps them"
    view = torch.from_numpy(array).view(10, 100).unbind(0)[3]
    del array
    gc.collect()
    assert len(driver.held) == 1
    del view
    gc.collect()
    assert not driver.held and not driver.current


@pytest.mark.parametrize("refuses", ["cuDeviceGet", "cuMemAllocManaged", "cuMemAdvise 3", "cuMemAdvise 5", "access"])
def test_none_where_the_driver_refuses(
    refuses: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is left behind, and it is said once."""
    caplog.set_level(logging.WARNING)
    driver = with_driver(monkeypatch, refuses, concurrent=int(refuses != "access"))
    for _ in range(2):
        assert managed_bytes(1000, torch.device("cuda", 0)) is None
    assert not driver.held and not driver.current
    assert caplog.text.count("no managed memory") == 1


def test_no_driver_and_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch)
    assert managed_bytes(0, torch.device("cuda", 0)) is None
    monkeypatch.setattr(managed, "_driver", lambda: None)
    assert managed_bytes(1000, torch.device("cuda", 0)) is None


@pytest.mark.cuda
def test_memory_of_any_thread() -> None:
    """Builders of indexes are threads that have not called the driver yet; a device reads what they wrote in place."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(managed_bytes(1 << 20, torch.device("cuda"))))
    thread.start()
    thread.join()
    (array,) = found
    assert array is not None and array.nbytes == 1 << 20
    array[:] = np.arange(1 << 20, dtype=np.uint8)
    assert torch.equal(torch.from_numpy(array).to("cuda"), torch.arange(1 << 20, device="cuda").to(torch.uint8))


def test_a_byte_of_each_page_is_written() -> None:
    memory = np.full(10 * mmap.PAGESIZE + 7, 5, np.uint8)
    managed.take_pages(memory)
    assert np.flatnonzero(memory == 0).tolist() == [page * mmap.PAGESIZE for page in range(11)]
