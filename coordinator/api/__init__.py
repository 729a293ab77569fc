"""The HTTP door: OpenAI's and Anthropic's shapes, health and metrics, on the coordinator's own event loop."""
