"""Connections to the hosts of a job, and what is shown of them."""
