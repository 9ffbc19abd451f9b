"""Who waits for whom: deadlocks and stacks."""
