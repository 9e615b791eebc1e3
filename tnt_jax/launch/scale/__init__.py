"""How the speed of a training script depends on the number of ranks: measured, shown, projected.

`tnt-jax scale` (`command`) starts the script's first `fit` on several numbers of ranks, one job
after the other. Each of these runs tells what it measured as a `Run`; `Scaling` makes a table and a
picture of them. `projection.project` continues the curve.

All but the command uses the standard library alone, and Matplotlib to draw.
"""
