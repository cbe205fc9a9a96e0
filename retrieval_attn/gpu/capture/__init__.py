"""Capture and replay of a step, and how the host is called inside it."""
