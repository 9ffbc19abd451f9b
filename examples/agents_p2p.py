"""Agents that work together with no one in charge: workflows by messages, sums in any order, a matrix product.

Four agents hand 2,000 workflows on to each other, add up values under 500 keys, each agent in an order of its own, and
multiply two matrices as a grid. The program makes one call per agent for each of these, and waits.
"""

import asyncio
import random

import torch
from torch import Tensor

import aiodaft

WORKFLOWS, SUMS, WIDTH = 2_000, 500, 256
GENERATOR, CRITIC, TOOL, PUBLISHER = range(4)
STEPS = (GENERATOR, CRITIC, TOOL, CRITIC, PUBLISHER)
ANSWERS = ("", "needs a source", "found one", "good", "published")


class Agent(aiodaft.Actor):
    def __init__(self) -> None:
        self.group: aiodaft.typing.CurrentGroup[Agent] = aiodaft.current_group()

    @aiodaft.method
    async def work(self) -> list[str]:
        """Do this agent's steps of all workflows. Returns the texts that it has published."""
        rank, published = self.group.rank, list[str]()
        # A send may wait for room at the next agent; meanwhile this one receives.
        async with asyncio.TaskGroup() as sends:

            def hand_on(step: int, text: str) -> None:
                if step < len(STEPS):
                    sends.create_task(self.group.send(text, to=STEPS[step], tag=step))
                else:
                    published.append(text)

            if rank == GENERATOR:
                for number in range(WORKFLOWS):
                    hand_on(1, f"draft {number}")
            for _ in range(WORKFLOWS * STEPS[1:].count(rank)):
                message = await self.group.recv_message()
                step = int(message.tag)
                hand_on(step + 1, f"{message.value} < {ANSWERS[step]}")
        return published

    @aiodaft.method
    async def add_up(self) -> int:
        """Add up a value of each agent under each key, in any order. Returns how many sums are right."""
        keys = list(range(SUMS))
        random.Random(self.group.rank).shuffle(keys)
        sums = {key: self.group.all_reduce(key + self.group.rank, key=key) for key in keys}
        return sum([await total == 4 * key + 6 for key, total in sums.items()])

    @aiodaft.method
    async def multiply(self, a_MK: Tensor, b_KN: Tensor) -> Tensor:
        """Multiply two matrices, of which each agent has a block (Cannon): blocks move to the left and up."""
        row, column = self.group.along("column"), self.group.along("row")
        a_MK, b_KN = await asyncio.gather(shift(row, a_MK, column.rank), shift(column, b_KN, row.rank))
        product_MN = a_MK @ b_KN
        for _ in range(row.size - 1):
            a_MK, b_KN = await asyncio.gather(shift(row, a_MK, 1), shift(column, b_KN, 1))
            product_MN += a_MK @ b_KN
        return product_MN


async def shift(ring: aiodaft.typing.CurrentGroup[Agent], block: Tensor, by: int) -> Tensor:
    """Pass a block on around a ring, and take the one that comes."""
    await ring.send(block, to=(ring.rank - by) % ring.size)
    shifted: Tensor = await ring.recv(source=(ring.rank + by) % ring.size)
    return shifted


def blocks(matrix: Tensor) -> list[Tensor]:
    return [block for rows in matrix.chunk(2) for block in rows.chunk(2, dim=1)]


async def main() -> None:
    async with aiodaft.Runtime() as rt, rt.group(4, Agent, axes={"row": 2, "column": 2}) as agents:
        before = rt.traffic()
        *_, published = await agents.all(Agent.work)
        after = rt.traffic()
        numbers = sorted(int(text.split()[1]) for text in published)
        print(f"{len(published)} workflows, each once: {numbers == list(range(WORKFLOWS))}")
        print("  such as:", next(text for text in published if text.startswith("draft 7 ")))
        print(f"  the controller sent {after.messages_sent - before.messages_sent} messages")

        print(f"{SUMS} sums in four orders are right at each agent: {await agents.all(Agent.add_up) == [SUMS] * 4}")

        torch.manual_seed(0)
        a, b = torch.rand(WIDTH, WIDTH), torch.rand(WIDTH, WIDTH)
        parts = zip(agents, blocks(a), blocks(b), strict=True)
        upper_left, upper_right, lower_left, lower_right = await asyncio.gather(
            *(x.multiply(y, z) for x, y, z in parts)
        )
        product = torch.cat([torch.cat([upper_left, upper_right], 1), torch.cat([lower_left, lower_right], 1)])
        print(f"the product of the grid is that of torch: {torch.allclose(product, a @ b, rtol=1e-5)}")


if __name__ == "__main__":
    aiodaft.run(main())
