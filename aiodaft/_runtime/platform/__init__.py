"""Tasks, threads, processes, forks, GPUs and the log, as asyncio and Linux offer them.

May import `_protocol` and the transport; no other room.
"""
