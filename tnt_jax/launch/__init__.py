"""Starts a training script on every device of one host, of a list of hosts or of a cluster's allocation.

The doors: `command.main` is the program `tnt-jax`; `clusters.detect_job` tells a process which job it belongs to.

How a job runs: `connection` starts one small `supervisor` program on each host (locally, through ssh or through srun); it
reports `facts`; the pure function `plan.plan_processes` turns hosts, devices and options into a list of `Process`; the
supervisors start these and watch them, and `session` shows their output and ends all when one fails.

This package uses the standard library and `tnt_jax.settings` alone and never imports JAX.
"""
