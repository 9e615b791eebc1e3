"""What a launch was asked for, and which processes it starts where."""
