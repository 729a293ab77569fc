"""Nodes, the chain over them, and requests running through it. I/O."""
