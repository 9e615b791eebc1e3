"""`tnt-jax verify`: whether a script trains the same on any number of ranks, and where not."""
