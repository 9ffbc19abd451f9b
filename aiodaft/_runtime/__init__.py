"""The asyncio shell: carries out what `aiodaft._protocol` decides, over sockets, processes and threads.

A room may import only the rooms after it, also for types:
scope_actors, controller, supervision, node, peer, agent, channels, diagnostics, graphs, calls, actors, objects,
connections, serialization, process, platform. `peer` builds the parts of a process; only the controller and a worker's
`worker_main` take the whole `Peer`.
"""
