"""Passes over the instructions of a plan."""
