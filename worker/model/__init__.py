"""What a model is: families, checkpoints, sizes. Nothing here computes."""
