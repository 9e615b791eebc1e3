"""A trainer without a facade: states, steps, loops and checkpoints of any adapted model.

It knows nothing of Keras and touches no files except its own.
"""
