"""Channels: the process that has the queue, the senders and the receivers."""
