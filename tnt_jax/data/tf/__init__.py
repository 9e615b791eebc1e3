"""Inspection of `tf.data` pipelines, and all access to private names of TensorFlow."""
