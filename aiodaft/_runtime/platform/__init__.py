"""What asyncio, threads and Linux offer, before there is any actor."""
