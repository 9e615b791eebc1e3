"""The equal blocks of a model, found in its traced program."""
