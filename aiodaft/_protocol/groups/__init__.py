"""Who is in a group, and what its members do together."""
