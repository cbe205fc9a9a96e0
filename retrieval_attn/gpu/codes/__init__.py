"""Codes of keys on the device, and their search."""
