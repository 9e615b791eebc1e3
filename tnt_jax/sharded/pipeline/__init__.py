"""Stages of blocks that work on micro-batches in turn."""
