import aiodaft


class Greeter(aiodaft.Actor):
    @aiodaft.method
    async def greet(self, name: str) -> str:
        return f"hello, {name}"


async def main() -> None:
    async with aiodaft.Runtime() as rt, rt.spawn(Greeter) as greeter:
        print(await greeter.greet("world"))


if __name__ == "__main__":
    aiodaft.run(main())
