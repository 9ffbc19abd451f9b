"""The ground of the runtime's rooms in tests without processes: a process, a thread that the test turns, a wire."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from aiodaft._protocol.connections import messages as m
from aiodaft._protocol.connections.session import Definitions
from aiodaft._protocol.ids import CallId, PeerId
from aiodaft._runtime.objects.store import Store
from aiodaft._runtime.platform.threads import HelperThread
from aiodaft._runtime.process import Env, Process, ProcessOptions, Timeouts
from aiodaft._runtime.serialization.errors import decode_failure
from aiodaft_transport import Key
from aiodaft_transport.memory import Arena

HERE, THERE, ELSEWHERE = PeerId("here"), PeerId("there"), PeerId("elsewhere")


class TurnedThread(HelperThread):
    """Runs a job when the test says so, on the loop's own thread."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name, loop)
        self.jobs: deque[Callable[[], object]] = deque()

    @property
    def backlog(self) -> int:
        return max(0, len(self.jobs) - 1)

    def submit(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)

    def turn(self) -> None:
        """Run the next job."""
        self.jobs.popleft()()

    def close(self) -> None:
        """There is no thread to end."""


class Bench:
    """A process without connections. The test turns its threads."""

    def __init__(
        self, *, name: PeerId = HERE, grace: float = 60.0, max_pending: int = 8, timeouts: Timeouts | None = None
    ) -> None:
        self.threads: dict[str, TurnedThread] = {}
        env = Env(thread=self._thread, timeouts=timeouts or Timeouts())
        options = ProcessOptions(name, "node", HERE, HERE, HERE, HERE, "none", False, grace, max_pending)
        self.process = Process(options, Key(bytes(32)), env)
        # Its grants lead nowhere.
        pool = Arena(shared=False)
        transport: Any = SimpleNamespace(
            name="none",
            shared=True,
            allocate=pool.allocate,
            adopt=lambda block: block,
            grant=lambda block, route: block.nbytes,
            close=pool.close,
        )
        self.store = Store(self.process, lambda name: transport)

    def _thread(self, name: str, loop: asyncio.AbstractEventLoop) -> TurnedThread:
        thread = self.threads[name] = TurnedThread(name, loop)
        return thread

    @property
    def helper(self) -> TurnedThread:
        """The thread that copies and encodes."""
        return self.threads[f"aiodaft {self.process.id} copies"]


class Wire:
    """A connection, as the answering side sees it: the sent messages, and a future for each answer."""

    def __init__(self, remote: PeerId = THERE) -> None:
        self.remote = remote
        self.lost: Exception | None = None
        self.sent: list[m.Message] = []
        self.definitions: Definitions[Any] = Definitions()
        self._answers: dict[CallId, asyncio.Future[m.Message]] = {}

    def send(self, message: m.Message) -> None:
        if self.lost is not None:
            return
        self.sent.append(message)
        answer = self._answer(message[1])
        if not answer.done():
            answer.set_result(message)

    def tell_over(self, number: CallId) -> None:
        # Stands for the message that has several of them.
        self.send((m.REPLY, number, None))

    def _answer(self, number: CallId) -> asyncio.Future[m.Message]:
        return self._answers.setdefault(number, asyncio.get_running_loop().create_future())

    @property
    def answered(self) -> list[int]:
        """The numbers of the answered calls, in the order of the answers."""
        return [message[1] for message in self.sent]

    async def result(self, number: int) -> Any:
        """The plain result of a call, or raise its error; with the marks that the caller would see."""
        message = await self._answer(CallId(number))
        if message[0] == m.ERROR:
            raise decode_failure(message[2], message[3])
        assert message[0] == m.REPLY
        return message[2]


async def turns(count: int = 3) -> None:
    """The loop runs its ready callbacks, and those that follow from them."""
    for _ in range(count):
        await asyncio.sleep(0)
