"""What a model is worth: `verify` proves that the cluster is it, others evaluate, calibrate and quantise it."""
