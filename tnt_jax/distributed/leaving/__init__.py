"""How processes end: notices of exit, signals, and what the others make of them."""
