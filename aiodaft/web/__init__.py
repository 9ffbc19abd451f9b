"""Web servers: an ASGI app in front of actors, with admission, disconnects and probes."""

from aiodaft.web.exchange import ClientDisconnected, cancel_on_disconnect
from aiodaft.web.ingress import Ingress, Probes

__all__ = ["ClientDisconnected", "Ingress", "Probes", "cancel_on_disconnect"]
