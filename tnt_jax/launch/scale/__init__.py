"""`tnt-jax scale`: how the speed of a script depends on the ranks, measured and projected."""
