"""Arguments of `compile`, made into the objective of the training step."""
