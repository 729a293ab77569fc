"""`brigade verify`: proves that the cluster is the model."""
