"""How a process finds its job, its devices and its ranks."""
