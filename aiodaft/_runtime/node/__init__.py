"""One machine: its worker processes, how they start, live and end."""
