"""The global batch, exactly: which rows each process reads, and where they come from."""
