"""The index kind `sketch`: near keys in leaves, a few numbers of each key."""
