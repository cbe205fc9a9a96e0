"""What a GPU machine measures in one call of `tools.card_measures`."""
