"""Values that processes exchange outside of steps."""
