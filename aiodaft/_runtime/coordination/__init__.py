"""The coordinator of a runtime or cluster, and where it stores what a restart must find.

May import process and the rooms below it.
"""
