"""Custom loops in processes of `tnt-jax` commands, which measure steps instead of training."""
