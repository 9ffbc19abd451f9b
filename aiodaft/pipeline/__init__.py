"""Pipeline parallelism: schedules as data, and `drive`, which runs them on actors.

A schedule is a list of tasks per rank. Write one by hand, take a known one, or let a solver make one: `simulate`
computes its cost, and `drive` runs it.
"""

from .schedule import (
    UNIT_COSTS,
    Costs,
    Kind,
    PipelineRank,
    Schedule,
    ScheduleError,
    Task,
    Timeline,
    Transfer,
    drive,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    transfers,
    zb_h1,
    zb_h2,
    zbv,
)
from .solver import solved

__all__ = [
    "UNIT_COSTS",
    "Costs",
    "Kind",
    "PipelineRank",
    "Schedule",
    "ScheduleError",
    "Task",
    "Timeline",
    "Transfer",
    "drive",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "simulate",
    "solved",
    "transfers",
    "zb_h1",
    "zb_h2",
    "zbv",
]
