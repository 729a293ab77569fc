"""How a session's next window is made up, and what of its answer holds. Pure."""
