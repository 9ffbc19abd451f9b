"""Control connections between processes: sockets, shared-memory rings, and their traffic."""
