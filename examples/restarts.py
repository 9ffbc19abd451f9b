"""An actor that dies, comes back, and goes on from its last checkpoint.

python examples/restarts.py
"""

import contextlib
import os
import signal
import tempfile
from pathlib import Path

import aiodaft

DIES_AT = 3


class Counter(aiodaft.Actor, restart=aiodaft.Restart(intensity=2, period=60)):
    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = Path(checkpoint)
        self.count = 0

    def on_restart(self, epoch: int) -> None:
        self.count = int(self.checkpoint.read_text())

    # Counting to a number twice does no harm, so a call that died with the process may be made again.
    @aiodaft.method(idempotent=True, retries=1)
    def count_to(self, number: int) -> str:
        if number == DIES_AT and aiodaft.supervision.current_attempt() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count = number
        self.checkpoint.write_text(str(number))
        return f"{self.count} at attempt {aiodaft.supervision.current_attempt()}"

    @aiodaft.method
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            # When the policy gives up, the scope is cancelled, and the runtime goes on.
            async with aiodaft.Runtime() as rt, rt.scope() as scope:
                counter = await scope.spawn(Counter, f"{folder}/checkpoint")
                for number in range(1, 5):
                    print(await counter.count_to(number))
                print((await rt.info(counter)).restarts, "restart")
                # After too many deaths, the error of the policy ends the scope.
                while True:
                    with contextlib.suppress(aiodaft.ActorDied):
                        await counter.die()
        except* aiodaft.exceptions.RestartLimitReached as group:
            (error,) = group.exceptions
            print(error)


if __name__ == "__main__":
    aiodaft.run(main())
