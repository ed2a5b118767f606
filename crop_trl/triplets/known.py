"""What the ledger of earlier runs tells about the endpoints that were asked."""

from dataclasses import dataclass, field
from typing import Any

from .ledger import request_key
from .settings import TripletSettings


@dataclass
class Known:
    """
    What the ledger of earlier runs tells about endpoints.

    Args:
        modes (`dict`): Endpoint to how it takes requests for JSON.
        askers (`set`): Models and template versions that were asked.
        served (`set`): Digests of endpoint and request fields (see [`served_digest`]) that have had an answer.
    """

    modes: dict[str, str] = field(default_factory=dict)
    askers: set[tuple[str, str]] = field(default_factory=set)
    served: set[str] = field(default_factory=set)

    def add(self, entry: dict[str, Any]) -> None:
        """Read an entry of the ledger."""
        if "key" in entry:
            self.askers.add((entry["model"], entry["templates"]))
        elif "endpoint" in entry:
            self.served.add(entry.get("served"))
            if entry["mode"]:
                self.modes[entry["endpoint"]] = entry["mode"]


def served_digest(settings: TripletSettings) -> str:
    """Tells apart what an endpoint may turn down for all requests alike: its model, a parameter, a limit."""
    return request_key(endpoint=settings.endpoint, fields=settings.request_fields())
