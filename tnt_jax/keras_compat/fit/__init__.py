"""`fit`, `evaluate` and `predict`, from their arguments to the last epoch."""
