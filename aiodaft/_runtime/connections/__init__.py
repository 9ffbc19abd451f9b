"""The connections between processes: sockets, rings in shared memory, and the messages that go over them."""
