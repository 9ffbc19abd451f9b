"""What two processes say to each other: frames, messages, the session of a connection, and its rings."""
