"""Agreement of all processes on the step after which they stop."""
