"""Copies of a finished layer's keys and values to the host, and of its queries and codes."""
