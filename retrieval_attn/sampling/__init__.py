"""Options that choose the tokens of an answer."""
