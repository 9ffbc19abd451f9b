"""The lives of values and streams: the borrowers of a value, the ways to fetch it, and its broadcast to many."""
