"""Wait graphs, deadlocks and stacks."""
