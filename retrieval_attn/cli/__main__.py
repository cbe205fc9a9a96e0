"""`python -m retrieval_attn.cli` is the program `retrieval-attn`."""

from __future__ import annotations

from retrieval_attn.cli import program

if __name__ == "__main__":
    program()
