"""Ray, as the rooms above see it: the only room that imports Ray, and only once something asks.

Ray is an optional package (`pip install "tnt-jax[ray]"`). This room knows nothing of JAX, so that
the launcher can use it, too. The entry point is `worker.import_ray`.
"""
