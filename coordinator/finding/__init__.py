"""Who is there: nodes that announce themselves, how they are reached, and the cluster.yaml that comes of it."""
