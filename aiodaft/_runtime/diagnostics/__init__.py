"""Wait graphs, deadlocks and stacks.

May import graphs and the rooms below it.
"""
