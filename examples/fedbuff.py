"""Federated training with clients of six speeds: the server averages the first updates that come, without the others.

    python examples/fedbuff.py --buffer 2

FedBuff: Nguyen et al., https://arxiv.org/abs/2106.06639. With `--buffer 6` the server waits for all, as FedAvg does.
"""

import argparse
import asyncio
from types import SimpleNamespace

import torch
from torch import Tensor

import aiodaft
from aiodaft.collectives import first_of

CLIENTS, INPUTS, CLASSES, LOCAL_STEPS = 6, 20, 5, 5


def data_of(client: int, size: int = 200) -> tuple[Tensor, Tensor]:
    """Noisy samples; each client sees other inputs."""
    generator = torch.Generator().manual_seed(client)
    true_IC = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(1000))
    x_BI = torch.randn(size, INPUTS, generator=generator) + 0.3 * torch.randn(INPUTS, generator=generator)
    y_BC = x_BI @ true_IC + torch.randn(size, CLASSES, generator=generator)
    return x_BI, y_BC.argmax(1)


def loss_of(weights_IC: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
    x_BI, y_B = data
    return torch.nn.functional.cross_entropy(x_BI @ weights_IC, y_B)


class Client(aiodaft.Actor):
    def __init__(self, number: int, seconds: float) -> None:
        self.data, self.seconds = data_of(number), seconds

    @aiodaft.method
    async def update(self, weights_IC: Tensor) -> Tensor:
        """The change of the weights by a few steps on the client's own data, which take it some time."""
        await asyncio.sleep(self.seconds)
        own_IC = weights_IC.clone().requires_grad_()
        for _ in range(LOCAL_STEPS):
            (gradient_IC,) = torch.autograd.grad(loss_of(own_IC, self.data), [own_IC])
            own_IC = (own_IC - 0.1 * gradient_IC).detach().requires_grad_()
        return (own_IC - weights_IC).detach()


async def train(clients: list[Client], buffer: int, goal: float) -> tuple[float, int]:
    """Train until the loss is below the goal; returns the seconds that it took, and the steps of the server."""
    loop, step = asyncio.get_running_loop(), 0
    weights_IC = torch.zeros(INPUTS, CLASSES)
    x_BI, y_B = map(torch.cat, zip(*map(data_of, range(len(clients))), strict=True))
    begun = loop.time()
    refs = [client.update(weights_IC) for client in clients]
    versions = [0] * len(clients)  # the steps whose weights the clients have
    while loss_of(weights_IC, (x_BI, y_B)) > goal:
        first = await first_of(refs, buffer, late="keep")
        for rank, change_IC in zip(first.ranks, await first.refs, strict=True):
            # An update of older weights counts less.
            weights_IC = weights_IC + change_IC / buffer / (1 + step - versions[rank]) ** 0.5
        step += 1
        for rank in first.ranks:
            refs[rank], versions[rank] = clients[rank].update(weights_IC), step
    seconds = loop.time() - begun
    aiodaft.Refs(refs).cancel()
    return seconds, step


async def main(options: SimpleNamespace) -> None:
    async with aiodaft.Runtime(preload=("torch",)) as rt:
        speeds = [options.unit * (1 + number) for number in range(CLIENTS)]
        clients = [await rt.spawn(Client, number, seconds) for number, seconds in enumerate(speeds)]
        seconds, steps = await train(clients, options.buffer, options.goal)
    print(f"buffer {options.buffer}: loss {options.goal} after {seconds / options.unit:.1f} units, {steps} steps")


def options_of(arguments: list[str] | None = None) -> SimpleNamespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buffer", type=int, default=2, help="the updates that the server waits for")
    parser.add_argument("--goal", type=float, default=0.6, help="the loss to reach")
    parser.add_argument("--unit", type=float, default=0.05, help="seconds that the fastest client takes")
    return parser.parse_args(arguments, SimpleNamespace())


if __name__ == "__main__":
    aiodaft.run(main(options_of()))
