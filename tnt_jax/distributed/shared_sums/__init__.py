"""Sums between the processes of one machine, in memory that they share."""
