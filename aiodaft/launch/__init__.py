"""Clusters for the time of a block: nodes are started on machines that somebody else hands out, and end with it."""

from aiodaft.launch.ray_bundles import ray
from aiodaft.launch.started_node import ssh

__all__ = ["ray", "ssh"]
