"""Times steps, tells what they are made of, and finds faster settings."""
