"""What lies in deploy/: the dashboard asks for metrics that the server has, the container file copies what there is."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana.json").read_text())


def asked() -> set[str]:
    """Metrics that the dashboard's queries name."""
    found = {name for panel in DASHBOARD["panels"] for one in panel["targets"] for name in names(one["expr"])}
    return found | {name for one in DASHBOARD["templating"]["list"] for name in names(one["query"])}


def names(query: str) -> list[str]:
    return re.findall(r"retrieval_attn:\w+", query)


def test_the_dashboard_asks_for_what_the_server_has() -> None:
    """A metric that is renamed leaves no empty panel behind."""
    pytest.importorskip("prometheus_client", reason="the server needs it; pip install 'retrieval-attn[serve]'")
    metrics = pytest.importorskip("retrieval_attn.server.metrics", reason="there is no server here").Metrics()
    text = metrics.text(None, 0).decode()
    # a counter with labels has no sample before it counts
    known = {f"{name}{end}" for name in names(text) for end in ("", "_bucket")}
    assert asked() and not asked() - known


def test_the_dashboard_is_whole() -> None:
    """Each panel has its own number and place, a unit, and a text that says what it shows."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 10
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart = (
            one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        )  # fmt: skip
        assert apart, (one, other)
    for panel in panels:
        assert panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert {one["datasource"]["uid"] for one in panel["targets"]} == {"${datasource}"}
    for query in (one["expr"] for panel in panels for one in panel["targets"]):
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
        assert query.count('job=~"$job"') == len(names(query)), f"one job of several: {query}"


def test_the_container_file_copies_what_there_is() -> None:
    text = (ROOT / "deploy" / "Containerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for name in line.split()[:-1]]
    assert copied and not [name for name in copied if not (ROOT / name).exists()]
    assert "USER server" in text and "HEALTHCHECK" in text and "ENTRYPOINT" in text
