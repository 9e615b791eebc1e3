"""Names that Keras users know: `Model`, losses, metrics, optimizers, schedules, callbacks."""
