"""An HTTP server that speaks OpenAI's API: one app over one engine, in this process or in one of its own."""
