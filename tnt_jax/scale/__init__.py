"""How the speed of a training script depends on the number of ranks: measured, shown, projected.

`tnt-jax scale` starts the script's first `fit` on several numbers of ranks. Each of these runs
tells what it measured as a `Run`; `Scaling` makes a table and a picture of them.
`projection.project` continues the curve.

This room uses the standard library alone, and Matplotlib to draw.
"""
