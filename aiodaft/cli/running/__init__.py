"""Commands that ask a running program on this machine."""
