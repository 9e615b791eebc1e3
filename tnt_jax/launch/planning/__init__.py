"""Options of a launch, and which processes it starts where."""
