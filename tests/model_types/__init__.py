"""Every model type of mlx-lm, tiny: what a chain of one-layer stages makes of it."""
