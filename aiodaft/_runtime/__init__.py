"""The asyncio shell: carries out the decisions of `aiodaft._protocol`, over sockets, processes and threads.

A room imports only the rooms below it, also for types: `pyproject.toml` has their order, `docs/architecture.md` their
purpose. `peer` builds the parts of a process; only the controller and a worker's `worker_main` take the whole
`Peer`.
"""
