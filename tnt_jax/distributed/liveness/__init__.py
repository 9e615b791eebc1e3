"""Which processes of a job are there, where each of them is, and which are stuck or slow."""
