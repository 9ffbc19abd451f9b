"""Restarts: policies, and the life of a supervised actor."""
