"""What `compile` is given, made into the objective of the training step."""
