"""The language of two processes: frames, messages, the session of a connection, and its rings."""
