"""What the scheduler knows about one job while it is there. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from retrieval_attn.engine.request_needs import RequestNeeds, State

__all__ = ["ScheduledRequest"]


@dataclass(slots=True)
class ScheduledRequest:
    """One job: its state and what it holds. order: of submission. interactive: by priority or, since, by age.

    charged: the priority whose queue it was admitted from. generated: tokens that came; in_flight: steps that it was
    planned for and whose result is not there yet. at_end: its next cell ends a layer's pass. since: the tick in which
    it last got a slot. overtaken: jobs behind it that were admitted while it lacked host memory.
    """

    job: RequestNeeds
    submitted: float
    order: int
    host_bytes: int
    is_long: bool
    interactive: bool
    state: State = State.WAITING
    charged: bool = False
    slot: int = -1
    generated: int = 0
    in_flight: int = 0
    cells_done: int = 0
    at_end: bool = False
    since: int = -1
    overtaken: int = 0

    @property
    def has_bytes(self) -> bool:
        return self.state not in (State.WAITING, State.GONE)

    @property
    def wants_step(self) -> bool:
        """Whether a further step could still be of use: steps on their way may bring its last token."""
        return self.generated + self.in_flight < self.job.max_tokens
