"""The model that is trained: its variables, its optimizer, and how it is built."""
