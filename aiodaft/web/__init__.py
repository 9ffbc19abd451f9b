"""Web servers: an ASGI app in front of actors, with admission, disconnects and probes."""

from aiodaft.web.disconnect import ClientDisconnected, cancel_on_disconnect
from aiodaft.web.ingress import Ingress

__all__ = ["ClientDisconnected", "Ingress", "cancel_on_disconnect"]
