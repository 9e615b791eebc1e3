"""Ray Data: datasets whose rows are prepared by tasks on other nodes of a Ray cluster.

Ray is imported on first use. `source.py` reads a whole dataset, of which `row_stream.py`, an actor,
gives each process its rows, and what `streaming_split` has cut.
"""
