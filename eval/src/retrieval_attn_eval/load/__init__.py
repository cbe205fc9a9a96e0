"""Load: traces of requests that are drawn, converted from published ones, and replayed against a server."""
