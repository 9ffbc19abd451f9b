"""For tests of programs: actors without processes, faults, and a loop with a virtual clock."""

from aiodaft.testing.faults import Faults
from aiodaft.testing.in_process import AutojumpLoop, Hang, in_process

__all__ = ["AutojumpLoop", "Faults", "Hang", "in_process"]
