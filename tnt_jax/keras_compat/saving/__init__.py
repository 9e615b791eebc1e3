"""Models and their parts as files and configurations."""
