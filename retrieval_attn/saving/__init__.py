"""Contexts to and from a store: KV, indexes, clusters, token ids."""
