"""Deadlocks, errors that no code has seen, and the output of actors."""
