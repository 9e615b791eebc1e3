"""Sums over the ranks within a step, and random numbers that are drawn by row."""
