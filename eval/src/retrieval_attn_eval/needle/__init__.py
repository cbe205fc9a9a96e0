"""The needle-in-a-haystack test."""
