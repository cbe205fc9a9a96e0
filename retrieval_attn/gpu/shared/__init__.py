"""Attention of many rows to prefixes that they share: each prefix's keys are read once for all rows over it."""
