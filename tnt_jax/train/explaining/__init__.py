"""What `tnt-jax explain` measures of steps, whoever trains."""
