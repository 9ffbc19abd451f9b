"""Clusters for the time of a block: nodes are started on machines that somebody else hands out, and end with it."""

from aiodaft.launch.nodes import ray, ssh

__all__ = ["ray", "ssh"]
