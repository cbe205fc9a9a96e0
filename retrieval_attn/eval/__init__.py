"""Evaluation through the public API: needle test, tasks, baselines, benchmarks."""

# The root also shows this folder as the link `eval`: imported through it, every class would exist twice.
if not __name__.startswith("retrieval_attn."):
    raise ImportError("eval is a link to retrieval_attn/eval; write `import retrieval_attn.eval` instead")
