"""The asyncio shell: drives the rules of `aiodaft._protocol` over sockets, processes and threads."""
