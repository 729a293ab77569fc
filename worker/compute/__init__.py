"""A shard's layers and the sampler: everything that runs on the MLX thread."""
