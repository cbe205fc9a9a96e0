"""The device side of attention: exact attention with its log-sum-exp, window cache, merge kernel."""

# The root also shows this folder as the link `gpu`: imported through it, every class would exist twice.
if not __name__.startswith("retrieval_attn."):
    raise ImportError("gpu is a link to retrieval_attn/gpu; write `import retrieval_attn.gpu` instead")
