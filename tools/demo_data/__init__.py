"""What the demo model learns from: conversations made from a seed, nothing downloaded.

One module per kind of question. Each has `sample(rng, held_out)`, which gives a `Turn` that belongs to the training set
or, with `held_out`, one that training never sees.
"""
