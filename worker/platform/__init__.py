"""What any process of the product needs: the MLX thread, exit codes, the machine it runs on."""
