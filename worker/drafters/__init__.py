"""Drafters: models that guess several tokens on the last stage, for the chain to verify."""
