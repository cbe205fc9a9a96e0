"""Random schedules: arrivals, lengths, aborts, ends, failures, parks; counts are checked after every tick."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.request_needs import Priority, RequestNeeds
from tests.engine.plant import Plant

SCHEDULES = 600
GROUPS = 12


def limits(draw: random.Random) -> Limits:
    rows = draw.randint(1, 6)
    return Limits(
        rows=rows,
        host_bytes=draw.choice([400, 1_000, 10_000]) * 8,
        token_bytes=8,
        inter_token_seconds=draw.choice([0.0, 0.005, 0.05]),
        waiting=draw.choice([3, 1_000]),
        promote_seconds=draw.choice([0.1, 0.5, 60.0]),
        chunk_tokens=draw.choice([16, 64]),
        layers=draw.randint(1, 3),
        ahead=draw.randint(0, 3),
        quantum_tokens=draw.choice([1, 64, 1_024]),
    )


def run(seed: int) -> Plant:
    """One schedule until everything is gone."""
    draw = random.Random(seed)
    plant = Plant(limits(draw), seed, late=draw.random() < 0.5)
    arrivals = draw.randint(1, 60)
    aborting, bursts, drains = draw.choice([0.0, 0.02, 0.2]), draw.random() < 0.3, draw.random() < 0.2
    disturbed = draw.random() < 0.5
    names: list[str] = []
    for tick in range(20_000):
        while len(names) < arrivals and (bursts or draw.random() < 0.3):
            name = f"j{len(names)}"
            names.append(name)
            prompt = draw.choice([1, draw.randint(1, 60), draw.randint(1, 300)])
            job = RequestNeeds(
                name,
                prompt,
                draw.randint(1, 30),
                cached_tokens=draw.randrange(prompt) if draw.random() < 0.3 else 0,
                owner=draw.choice("abc"),
                priority=draw.choice(["interactive", "batch"]),
            )
            plant.submit(name, job)
        if names and draw.random() < aborting:
            plant.abort(draw.choice(names))
        if drains and len(names) == arrivals and tick % 7 == 0:
            plant.scheduler.drain()
        if disturbed:
            plant.disturb()
        plant.schedule()
        if len(names) == arrivals and plant.scheduler.idle:
            break
    assert plant.scheduler.idle and not plant.there, f"schedule {seed} does not end: {plant.there}"
    return plant


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=pytest.mark.fuzz if group % 3 else ()) for group in range(GROUPS)]
)
def test_random_schedules_keep_count_and_end(group: int) -> None:
    """The plant checks each plan against books of its own; here, that everyone got what they came for."""
    parks = 0
    for seed in range(group * SCHEDULES // GROUPS, (group + 1) * SCHEDULES // GROUPS):
        plant = run(seed)
        parks += plant.parks
        for request in plant.gone.values():
            if request.reason == "tokens":
                assert request.tokens == request.job.max_tokens
            if request.reason == "ended":
                assert request.tokens >= request.stops_after
        places = plant.scheduler._places
        assert places.unreserved_bytes == plant.limits.host_bytes
    assert parks, "these schedules park nobody: they test too little"


def test_the_same_schedule_gives_the_same_plans() -> None:
    for seed in range(0, SCHEDULES, 30):
        assert run(seed).plans == run(seed).plans


def test_the_schedules_reach_every_end() -> None:
    reasons = {request.reason for seed in range(20) for request in run(seed).gone.values()}
    assert reasons == {"tokens", "ended", "failed", "aborted"}


def test_load_decides_when_never_how_much() -> None:
    """Alone or among others, a job gets the same number of tokens and chunks."""
    alone = replace(limits(random.Random(0)), host_bytes=80_000, waiting=1_000)
    priorities: tuple[Priority, ...] = ("interactive", "batch")
    jobs = [RequestNeeds(f"j{n}", 5 + 13 * n, 1 + n, owner=str(n % 3), priority=priorities[n % 2]) for n in range(20)]
    together = Plant(alone, 1, late=True)
    for job in jobs:
        together.submit(job.id, job)
        together.there[job.id].stops_after = together.there[job.id].fails_after = 10_000
    while not together.scheduler.idle:
        together.schedule()
    assert {name: request.tokens for name, request in together.gone.items()} == {job.id: job.max_tokens for job in jobs}
