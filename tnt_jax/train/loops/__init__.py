"""Custom loops over the global batch: distributed datasets, and steps written for one device."""
