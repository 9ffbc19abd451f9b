"""Clients that leave sockets and threads behind, each in a process of its own: prints texts as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


async def langchain(url: str) -> list[Any]:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="letters", base_url=url, api_key="none", temperature=0, max_tokens=9, stream_usage=True)
    answer = await model.ainvoke("hello")
    streamed = "".join([str(part.content) async for part in model.astream("hello")])
    several = await model.abatch([[("system", str(number)), ("user", "x")] for number in range(8)])
    return [answer.content, answer.usage_metadata["output_tokens"], streamed, *(one.content for one in several)]


async def litellm(url: str) -> list[Any]:
    from litellm import acompletion

    options: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 9}
    options |= {"model": "openai/letters", "api_base": url, "api_key": "none"}
    answer = await acompletion(**options)
    parts = [part.choices[0].delta.content or "" async for part in await acompletion(**options, stream=True)]
    return [answer.choices[0].message.content, answer.usage.completion_tokens, "".join(parts)]


if __name__ == "__main__":
    print(json.dumps(asyncio.run({"langchain": langchain, "litellm": litellm}[sys.argv[1]](sys.argv[2]))))
