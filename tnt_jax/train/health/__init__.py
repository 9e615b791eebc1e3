"""Watches training for numbers that are not finite, spikes of the loss and differing ranks."""
