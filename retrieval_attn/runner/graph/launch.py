"""Launching a decoder's graphs for a bound cache: which steps were launched and are not confirmed.

A token counts once its step is confirmed: the caller has read something computed from the step's logits, and no host
search in it failed. One step may be launched ahead of that, with the token that the device chose itself.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrieval_attn.errors import BackendError, CaptureError, ContextLengthError
from retrieval_attn.gpu.capture.exchange import Replay
from retrieval_attn.runner.graph.binding import Binding
from retrieval_attn.runner.graph.capture import capture
from retrieval_attn.runner.graph.decoder import CapturedStep, GraphDecoder
from retrieval_attn.runner.graph.memory import ordinary_tensors


@dataclass
class _Launch:
    """A step that was launched and not confirmed.

    work, nanoseconds, error: of the host's searches, which are over.
    """

    replay: Replay
    generation: int
    needs_host: bool
    work: Any = 0
    nanoseconds: Any = 0
    error: BackendError | None = None


class Launcher:
    """See the module. Close it at the end."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._launched: list[_Launch] = []  # in order; the second one went ahead

    @property
    def decoder(self) -> GraphDecoder:
        """Whose graphs are launched."""
        return self._binding.decoder

    @property
    def chosen(self) -> Tensor:
        """The likeliest token (batch,) after the last step, the same memory at every step."""
        return self.decoder.memory.chosen

    @ordinary_tensors
    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """Launch the step for token (batch,) at position (batch,); returns its logits, (batch, vocabulary) float32.

        They lie in the same memory at every step of a kind, and so does `chosen`. Before the next step the caller waits
        for them, by reading what it chose from them, and calls `confirm`. Raises CaptureError where the step cannot go
        on as a graph (the cache then holds what was confirmed), ContextLengthError past the model's positions,
        BackendError where device and host lost each other: the step then did not happen.
        """
        binding = self._binding
        binding.cache.require_room(1)
        if binding.stale:
            binding.sync()
            binding.refresh()
        else:
            if binding.room == 0:
                binding.evict_blocks()
            binding.use_rows()
        self.decoder.memory.place(token, position)
        return self._launch(self._captured(token, position))

    @ordinary_tensors
    def rehearse(self) -> None:
        """Capture the step that comes next and launch it once, for token 0. It did not happen. Raises as `step`."""
        place = torch.tensor(self._binding.cache.batch.columns, device=self.chosen.device)
        rows = self.chosen.shape[0]
        self.step(self.chosen.new_zeros(rows), place.expand(rows))
        self.discard()

    @ordinary_tensors
    def launch_next(self) -> bool:
        """Launch the step of `chosen` at the next position before it is read: the device does not wait.

        The caller then confirms one after the other; what is not confirmed at the end did not happen. False, and
        nothing done, where this step has to wait for the other: no graph yet, a window that is full, an error.
        """
        binding = self._binding
        alone = self._launched[0] if len(self._launched) == 1 else None
        if (
            alone is None
            or alone.error is not None
            or binding.stale
            or binding.room < 2
            or binding.awaited.are_complete
        ):
            return False
        try:
            binding.cache.require_room(2)
        except ContextLengthError:
            return False
        self._launch(self.decoder.graphs[binding.kind])
        return True

    def confirm(self) -> None:
        """Commit the oldest launched step: count its token.

        Raises BackendError, with the layer named, if a host search failed or came too late; steps after it are lost.
        """
        if not self._launched:
            return
        launch = self._launched.pop(0)
        failure = launch.replay.failure(launch.generation) if launch.needs_host else None
        if launch.error is not None or failure is not None:
            self._launched.clear()
            self.decoder.states.undo()
            self._binding.invalidate()  # the device has counted a token that does not count
            raise launch.error or BackendError(failure)
        self._binding.commit(launch.work, launch.nanoseconds)

    def discard(self) -> None:
        """Steps that were launched and are not confirmed did not happen."""
        if self._launched:
            self._binding.runtime.synchronize()  # whose calls were served before `step` was left
            self._launched.clear()
            self.decoder.states.undo()
            self._binding.invalidate()

    def close(self) -> None:
        """Let the cache go, with all confirmed tokens in it; a launched one that was not confirmed is lost."""
        self.discard()
        self._binding.unbind()

    def _captured(self, token: Tensor, position: Tensor) -> CapturedStep:
        """The graph for what is bound now, captured where it is the first of its kind."""
        binding, decoder = self._binding, self.decoder
        if binding.kind not in decoder.graphs:
            try:
                captured = capture(binding, token, position)
            except CaptureError as error:
                decoder.capture_failure = str(error)
                raise
            decoder.captures += 1
            binding.update_kind()  # the host's parts were made: only now it is known what is searched
            decoder.graphs[binding.kind] = captured
        return decoder.graphs[binding.kind]

    def _launch(self, captured: CapturedStep) -> Tensor:
        replay = captured.replay
        try:
            replay()
        except BackendError:
            with contextlib.suppress(RuntimeError):  # the error is reported already
                self._binding.runtime.synchronize()
                self.decoder.states.undo(keep=len(self._launched))
            self._binding.invalidate()  # the device may have counted the token
            raise
        launch = _Launch(replay, replay.generation, self._binding.kind.needs_host)
        self._launched.append(launch)
        self._read_host(launch)
        self.decoder.replays += 1
        return captured.logits

    def _read_host(self, launch: _Launch) -> None:
        """Keep what the host's searches left: the next step writes over it."""
        if not launch.needs_host:
            return
        try:
            self.decoder.raise_host_error()
        except BackendError as error:
            launch.error = error
        launch.work, launch.nanoseconds = self.decoder.memory.host_meters()
