"""`tnt-jax doctor`: examines hosts, measures links between them, and suggests remedies."""
