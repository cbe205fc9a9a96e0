"""A server with OpenAI's API, as its client sees it. Imports no torch."""
