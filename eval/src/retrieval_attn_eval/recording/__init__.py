"""A model's queries, keys and values, written down."""
