"""The way of a finished layer's keys and values to the host, and of queries and codes beside it."""
