"""Detects the job of this process and the devices of its host, from the environment alone.

It uses only the standard library. The entry point is `clusters.detect_job`.
"""
