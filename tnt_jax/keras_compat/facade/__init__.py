"""`Model`, and the functions that save and load it."""
