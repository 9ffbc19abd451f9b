"""Output and log records of actors: options for `Runtime(logs=...)`, and lines of JSON for handlers of one's own."""

from aiodaft._runtime.logs.options import JsonFormatter, Logs

__all__ = ["JsonFormatter", "Logs"]
