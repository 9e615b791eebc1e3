"""Steps with the same bits on any number of devices.

A second implementation of `train.contracts.Steps`; it handles only programs.
"""
