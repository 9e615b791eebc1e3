"""Sums between CPU processes that overlap with computation.

Only `distributed.gradients` chooses this engine.
"""
