"""Checks and conversions of a model: verify, eval, calibrate, quantize."""
