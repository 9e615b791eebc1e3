"""`tnt-jax explain`: where the time of a step goes, and what helps."""
