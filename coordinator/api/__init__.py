"""The HTTP server: APIs of OpenAI and Anthropic, our own, health and metrics."""
