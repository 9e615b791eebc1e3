"""Times steps, finds out what they are made of, and finds faster settings."""
