"""The life of a call: its turn, the mailbox of its actor, restarts, and values that go straight to their consumer."""
