"""The public names, for type checkers."""

from torch.distributed.tensor import Partial, Replicate, Shard

from aiodaft.tensor.capturing import capture
from aiodaft.tensor.handles import DistTensor
from aiodaft.tensor.hardware import PRESETS, Hardware, Link
from aiodaft.tensor.loading import Run, Step, Workers, workers
from aiodaft.tensor.local_functions import local
from aiodaft.tensor.measuring import measure_hardware
from aiodaft.tensor.plan import Plan
from aiodaft.tensor.program import ImplicitCollectives, Program
from aiodaft.tensor.randoms import manual_seed
from aiodaft.tensor.recorder import immediate
from aiodaft.tensor.rules import rule
from aiodaft.tensor.searching import Candidate, Found, search
from aiodaft.tensor.segments import Collective
from aiodaft.tensor.simulation import Simulation
from aiodaft.tensor.strategy import Strategy
from aiodaft.tensor.tracer import CaptureError
from aiodaft.tensor.worker import Worker

__all__ = [
    "PRESETS",
    "Candidate",
    "CaptureError",
    "Collective",
    "DistTensor",
    "Found",
    "Hardware",
    "ImplicitCollectives",
    "Link",
    "Partial",
    "Plan",
    "Program",
    "Replicate",
    "Run",
    "Shard",
    "Simulation",
    "Step",
    "Strategy",
    "Worker",
    "Workers",
    "capture",
    "immediate",
    "local",
    "manual_seed",
    "measure_hardware",
    "rule",
    "search",
    "workers",
]
