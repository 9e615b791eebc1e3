"""`fit` in processes of `tnt-jax` commands, which measure or record steps instead of training."""
