"""Checkpoints: their files, and the position in the data that comes with them."""
