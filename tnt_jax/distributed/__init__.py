"""The ranks of a job and their communication: sums inside a step, host values between processes.

This package knows no model and no training state. It opens the devices, the job's coordination
service and the memory that processes of one machine share.
"""
