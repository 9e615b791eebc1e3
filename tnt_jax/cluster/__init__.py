"""Detects the job of this process and the devices of its host, from the environment, and from Ray.

It uses only the standard library and `tnt_jax.on_ray`. The entry point is `clusters.detect_job`.
"""
