"""Deadlocks, errors that no code has seen, and what actors print."""
