"""Sources that are read by the index of a row."""
