"""Evaluation of retrieval_attn: needle test, RULER, InfiniteBench, baselines, benchmarks, load for servers."""
