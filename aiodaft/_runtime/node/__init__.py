"""Worker processes: how they are started, watched and ended; the resources of a machine.

May import peer and the rooms below it; not the controller.
"""
