"""Plans, measured times and recovery: which layers go where, and their cost. Pure."""
