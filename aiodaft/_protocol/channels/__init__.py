"""Channels: which process has the queue, and who sends and receives."""
