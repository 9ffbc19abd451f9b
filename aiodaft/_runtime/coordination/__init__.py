"""The coordinator of a runtime or cluster, and the stores from which a restart reads its names and members."""
