"""Tasks, threads, processes, forks, GPUs and the log, as asyncio and Linux offer them."""
