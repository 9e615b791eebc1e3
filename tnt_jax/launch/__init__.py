"""Starts a training script on all devices of one host, a list of hosts or a cluster's allocation.

The entry point is `command.main`, the program `tnt-jax`. A job runs as follows. `connection` starts
a small `supervisor` program on each host (locally, through ssh or through srun), which reports the
host's `facts`. The pure function `plan.plan_processes` turns hosts, devices and options into a list
of `Process`. The supervisors start these and watch them. `session` shows their output, and ends all
of them when one fails.
"""
