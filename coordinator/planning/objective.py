"""What a plan can be good at. Apart from the search for it, which takes a moment to import."""

from typing import Literal

Objective = Literal["latency", "throughput"]  # one request's time per token, or many requests' tokens per second
USUAL_REQUESTS = 8  # at once, for throughput, if nobody says how many
