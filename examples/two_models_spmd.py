"""The job of two_models.py by send and recv of torch.distributed: one copy of this program for each half of the model.

`front_rank` and `back_rank` are the two sides of one schedule: each `send` of one needs a `receive` of the other.
`Link` says what comes before it sends it: a tensor with its type and shape, or the error that took its place.
"""

import os
import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from two_models import STEPS, batches, descend, make_half

TENSOR, ERROR = range(2)
DTYPES = [torch.float32, torch.int64, torch.uint8]
DIMS = 4


@dataclass
class Result:
    losses: list[float]
    outputs: Tensor
    error: str
    tensor_bytes: int
    other_bytes: int


class Link:
    # The other rank has to know the size of a message before it can receive it, so a header comes first.
    def __init__(self, rank: int) -> None:
        self.other, self.tensor_bytes, self.other_bytes = 1 - rank, 0, 0

    def send(self, x: Tensor, kind: int = TENSOR) -> None:
        padding = [0] * (DIMS - x.dim())
        header = torch.tensor([kind, DTYPES.index(x.dtype), x.dim(), *x.shape, *padding])
        dist.send(header, self.other)
        dist.send(x.contiguous(), self.other)
        self.tensor_bytes += x.nbytes if kind == TENSOR else 0
        self.other_bytes += header.nbytes + (x.nbytes if kind == ERROR else 0)

    def receive(self) -> Tensor:
        header = torch.empty(3 + DIMS, dtype=torch.int64)
        dist.recv(header, self.other)
        kind, dtype, dims, *shape = header.tolist()
        x = torch.empty(shape[:dims], dtype=DTYPES[dtype])
        dist.recv(x, self.other)
        if kind == ERROR:
            raise RuntimeError(f"rank {self.other} failed:\n{bytes(x.tolist()).decode().rstrip()}")
        return x

    def send_error(self) -> None:
        # Without it, the other rank would wait for a tensor until its timeout.
        self.send(torch.frombuffer(bytearray(traceback.format_exc().encode()), dtype=torch.uint8), ERROR)


def front_rank(link: Link, steps: int) -> Result:
    model, optimizer = make_half(0)
    for x, _ in batches(steps):
        output = model(x)
        link.send(output.detach())
        gradient = link.receive()
        optimizer.zero_grad()
        output.backward(gradient)
        optimizer.step()
    x, _ = next(batches(steps))
    link.send(model(x).detach())
    link.send(model(x).detach())
    try:
        link.receive()
    except RuntimeError as error:
        return Result([], torch.empty(0), str(error), link.tensor_bytes, link.other_bytes)
    raise AssertionError("the other rank has accepted targets of the wrong length")


def back_rank(link: Link, steps: int) -> Result:
    model, optimizer = make_half(1)

    def learn(y: Tensor) -> float:
        h = link.receive().requires_grad_()
        try:
            loss = descend(optimizer, model(h), y)
        except Exception:
            link.send_error()
            raise
        link.send(h.grad)
        return loss

    losses = [learn(y) for _, y in batches(steps)]
    outputs = model(link.receive()).detach()
    _, y = next(batches(steps))
    try:
        learn(y[:, 1:])
    except ValueError as error:
        return Result(losses, outputs, str(error), link.tensor_bytes, link.other_bytes)
    raise AssertionError("targets of the wrong length were accepted")


def run_rank(rank: int, folder: str, steps: int) -> None:
    # Both ranks are on this host.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    place, time = f"file://{folder}/store", timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2, timeout=time)
    torch.save((front_rank, back_rank)[rank](Link(rank), steps), f"{folder}/{rank}")
    dist.destroy_process_group()


def by_ranks(steps: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        # Ends the other rank when one dies.
        multiprocessing.spawn(run_rank, (folder, steps), nprocs=2)
        front, back = (torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(2))
    tensor_bytes, other_bytes = front.tensor_bytes + back.tensor_bytes, front.other_bytes + back.other_bytes
    return Result(back.losses, back.outputs, front.error, tensor_bytes, other_bytes)


if __name__ == "__main__":
    result = by_ranks(STEPS)
    print(f"two ranks: loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}")
    print(f"sent: {result.tensor_bytes} bytes of tensors, {result.other_bytes} bytes of headers and errors")
    print(f"\nAn error in the second half, as the first half sees it:\n\n{result.error}")
