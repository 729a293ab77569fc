"""Models: families, checkpoints, sizes. Nothing here computes."""
