"""A transfer queue: rows are samples, columns are fields, and each consumer sees each row that has its fields once.

The queue of AsyncFlow (Han et al. 2025, "AsyncFlow: An Asynchronous Streaming RL Framework for Efficient LLM
Post-Training") and MindSpeed RL, as actors of a user: values go from producers to storage actors and from there to
consumers; one metadata actor knows only numbers of rows and names of fields.
"""

from .rows import Sampler, at_once, oldest
from .transfer_queue import Batch, Consumer, Metadata, Storage, TransferQueue, Wants, open_queue

__all__ = [
    "Batch",
    "Consumer",
    "Metadata",
    "Sampler",
    "Storage",
    "TransferQueue",
    "Wants",
    "at_once",
    "oldest",
    "open_queue",
]
