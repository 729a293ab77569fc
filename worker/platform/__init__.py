"""Parts that any process of the product needs: the MLX thread, exit codes, facts about its machine."""
