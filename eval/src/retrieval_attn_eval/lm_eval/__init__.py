"""lm-evaluation-harness with retrieval attention."""
