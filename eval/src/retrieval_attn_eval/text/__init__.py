"""Texts to hide needles in: prose, words, files."""
