"""What must reach no log, file or message: keys, tokens and passwords among the settings."""

import json
import re
from collections.abc import Sequence

_SECRET = re.compile(r"(token|key|secret|password|passwd|credentials?|authorization)$", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a setting of this name holds a key, a token or a password."""
    return bool(_SECRET.search(name))


def masked(value):
    """A setting without what must reach no log: values of secret names, and what is secret in addresses."""
    if isinstance(value, dict):
        return {k: "<hidden>" if is_secret(str(k)) and isinstance(v, str) else masked(v) for k, v in value.items()}
    if isinstance(value, list):
        return [masked(item) for item in value]
    if not isinstance(value, str):
        return value
    value = re.sub(r"(?<=://)[^/@\s]+@", "<hidden>@", value)
    return re.sub(r"([?&][^=&#\s]*=)([^&#\s]+)", lambda m: m[1] + "<hidden>" if is_secret(m[1][:-1]) else m[0], value)


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command line without what must reach no log."""

    def shown(name: str, text: str) -> str:
        if text and is_secret(name):
            return "<hidden>"
        try:
            value = json.loads(text)
        except ValueError:
            return masked(text)
        return json.dumps(masked(value)) if isinstance(value, dict) else text

    found, name = [], ""
    for argument in arguments:
        if not argument.startswith("--"):
            found.append(shown(name, argument))
            continue
        name, equals, text = argument.partition("=")
        found.append(name + equals + shown(name, text))
    return found
