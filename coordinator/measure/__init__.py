"""What the cluster does, measured, compared and forecast."""
