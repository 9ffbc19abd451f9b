"""Compiled graphs: the plan, and the life of a run."""
