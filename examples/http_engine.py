"""An engine that answers over HTTP, on a socket that it inherits: the one that examples/frameworks.py starts."""

import json
import os
import signal
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        if prompt == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"text": prompt[::-1]}).encode())

    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    server = ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False)
    server.socket = socket.socket(fileno=int(sys.argv[1]))
    server.serve_forever()
