"""A torch module, a torch.distributed job, a command-line program and an HTTP engine, driven by one program.

Then each of them crashes: its caller gets an error that says what happened, and the restart policy brings it back.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import aiodaft

# They stand for any program that answers line by line, and any server that takes its socket by number (`uvicorn --fd`).
CALCULATOR = (sys.executable, "-c", "while line := input(): print(eval(line), flush=True)")
ENGINE = (sys.executable, str(Path(__file__).with_name("http_engine.py")))


class Trainer(aiodaft.Actor):
    """A rank of a data-parallel job, as it would run under torchrun."""

    @aiodaft.method
    def train(self, steps: int, crash_at: int | None = None) -> dict[str, Tensor]:
        with aiodaft.current_group().process_group("gloo") as group:
            torch.manual_seed(group.rank())
            model = DistributedDataParallel(nn.Linear(1, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
            for step in range(steps):
                if (group.rank(), step) == (1, crash_at):
                    os.kill(os.getpid(), signal.SIGKILL)
                x_BD = torch.randn(16, 1)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x_BD), 3 * x_BD + 1).backward()
                optimizer.step()
            return model.module.state_dict()


class Program(aiodaft.Actor):
    """A program that begins and ends with the actor, and the actor with it."""

    process: Process

    async def start(self, *command: str, **options: Any) -> Self:
        self.process = await asyncio.create_subprocess_exec(*command, **options)
        self.end = asyncio.get_running_loop().create_task(self.end_with_program())
        return self

    async def end_with_program(self) -> None:
        # The last lines of a process are in the ActorDied that its callers get.
        sys.exit(f"the program ended with status {await self.process.wait()}")

    async def __aexit__(self, *_: object) -> None:
        self.end.cancel()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class Calculator(Program):
    async def __aenter__(self) -> Self:
        return await self.start(*CALCULATOR, stdin=PIPE, stdout=PIPE)

    @aiodaft.method(concurrency=1)
    async def ask(self, line: str) -> str:
        self.process.stdin.write(f"{line}\n".encode())
        answer = await self.process.stdout.readline()
        return answer.decode().strip() if answer else await self.end


class Engine(Program):
    async def __aenter__(self) -> Self:
        # The port is open before the engine runs: no other program can take it, and no request comes too early.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            return await self.start(*ENGINE, str(listener.fileno()), pass_fds=[listener.fileno()])

    @aiodaft.method(concurrency=8)
    async def generate(self, prompt: str) -> str:
        try:
            return await asyncio.to_thread(self.post, {"prompt": prompt})
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            sys.exit(f"the engine does not answer: {error}")

    def post(self, request: dict[str, str]) -> str:
        with urllib.request.urlopen(self.address, json.dumps(request).encode()) as response:
            return json.load(response)["text"]


async def crash(what: str, *calls: Awaitable[object]) -> None:
    for error in await asyncio.gather(*calls, return_exceptions=True):
        print(f"{what}: {type(error).__name__}: {error}", *getattr(error, "last_lines", ()), sep="\n    ")


async def main() -> None:
    # Modules of the ranks are imported once, not by each: the optimizers of torch import torch._dynamo.
    async with aiodaft.Runtime(preload=("torch.distributed", "torch._dynamo")) as rt:
        on = rt.on(restart=aiodaft.Restart())
        trainers, model = await on.group(4, Trainer), await on.spawn(nn.Linear, 1, 1)
        calculator, engine = await on.spawn(Calculator), await on.spawn(Engine)

        async def use_all() -> None:
            weights, *_ = trainers.all(Trainer.train, 40)
            await model.call(nn.Linear.load_state_dict, weights)
            y = await model.call(nn.Linear.__call__, torch.tensor([2.0]))
            print(
                f"3 * 2 + 1 = {y.item():.3f}; 6 * 7 = {await calculator.ask('6 * 7')};", await engine.generate("olleh")
            )

        await use_all()
        await crash("the module", model.call(nn.Linear.__call__, torch.ones(3)))
        await crash("the program", calculator.ask("__import__('os').kill(__import__('os').getpid(), 9)"))
        await crash("the engine", engine.generate("crash"))
        await crash("the job", *trainers.all(Trainer.train, 40, crash_at=20))
        await use_all()


if __name__ == "__main__":
    aiodaft.run(main())
