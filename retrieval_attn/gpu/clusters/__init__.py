"""Clusters of keys, and the part of attention that they estimate."""
