"""Runs in experiment trackers: one callback, and an adapter in a file of its own for each."""
