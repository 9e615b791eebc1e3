"""`tnt-jax doctor`: examines the hosts of a job, measures the links between them, and says what to do about what is wrong."""
