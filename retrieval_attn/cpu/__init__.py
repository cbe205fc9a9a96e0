"""The host side of attention: stored keys and values, and attention over them. NumPy and Numba only; never torch."""

import retrieval_attn.compile.numba_cache  # noqa: F401  # before any kernel is defined

# The root also shows this folder as the link `cpu`: imported through it, every class would exist twice.
if not __name__.startswith("retrieval_attn."):
    raise ImportError("cpu is a link to retrieval_attn/cpu; write `import retrieval_attn.cpu` instead")
