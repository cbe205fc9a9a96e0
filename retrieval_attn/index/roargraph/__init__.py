"""The index kind `roargraph`: a graph trained by the exact lists of real queries."""
