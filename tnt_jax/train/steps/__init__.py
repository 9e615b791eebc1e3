"""The programs of training: what one step computes on the ranks."""
