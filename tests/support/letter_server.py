"""A server of letters as a program of its own: the far end of an `HttpEngine`, and of load generators."""

from __future__ import annotations

import sys

import uvicorn
from letter_engine import Opened

import aiodaft
from aiodaft import serve

if __name__ == "__main__":
    app = serve.app(Opened(), "letters", runtime=lambda: aiodaft.Runtime(preload=(), unhandled="log"))
    uvicorn.run(app, port=int(sys.argv[1]), lifespan="on", log_level="warning", ws="none")
