"""`tnt-jax scale`: the same script on several numbers of devices, one job after the other."""
