"""What a model is: families, checkpoints, sizes. No MLX work."""
