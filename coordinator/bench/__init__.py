"""`brigade bench`: throughput and latency, measured and simulated."""
