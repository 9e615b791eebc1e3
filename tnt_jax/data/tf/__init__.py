"""Inspection of `tf.data` pipelines, and all access to private names of TensorFlow.

This package is imported once there is a pipeline.
"""
