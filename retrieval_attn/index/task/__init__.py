"""Searches as tasks: the step's records, atomics, scans, candidates, and one search by itself."""
