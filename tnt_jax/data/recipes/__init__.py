"""Images, text and token batches, made ready for training."""
