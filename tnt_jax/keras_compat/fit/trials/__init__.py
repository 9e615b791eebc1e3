"""`fit` in a script that is searched over, tuned or timed."""
