"""For tests of programs: actors without processes, faults, and a loop with a virtual clock."""

from aiodaft.testing.in_process import AutojumpLoop, Faults, Hang, in_process

__all__ = ["AutojumpLoop", "Faults", "Hang", "in_process"]
