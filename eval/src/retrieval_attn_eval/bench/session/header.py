"""The first lines of a report whose subject is that of a session: what was run, where, and of which commit."""

from __future__ import annotations

from typing import Any

__all__ = ["cap_of", "header"]


def header(report: dict[str, Any], facts: dict[str, Any], *more: str) -> list[str]:
    """Lines up to the commit. facts: `Subject.about`, or what is known of it; more: of the device, such as its cap."""
    machine, versions = report["machine"], report["versions"]
    device = ", ".join([str(facts.get("device", "not known")), *more])
    shown = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "transformers", "numba"))
    return [
        f"- command: `{' '.join(report['command'])}`",
        f"- machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; device {device}",
        f"- versions: {shown}",
        f"- commit: {report['commit']}",
    ]


def cap_of(report: dict[str, Any]) -> str:
    """The most of the card's memory that was allowed."""
    return "no cap" if report["gpu_memory"] is None else f"cap {report['gpu_memory'] / (1 << 30):.2f} GiB"
