"""Prompts: chat templates rendered within a time limit, and texts encoded without control tokens."""
