"""`crop-trl NAME ...`: one program for all commands."""

import difflib
import sys
from importlib import import_module

from . import COMMANDS
from .errors import told


def usage() -> str:
    """The commands with a line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {line}" for name, line in COMMANDS.items()]
    return "\n".join(["usage: crop-trl COMMAND ...", "", *lines, "", "`crop-trl COMMAND --help` lists its options."])


def main(argv: list[str] | None = None):
    """Hand over to the command that is named."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        return print(usage())
    with told():
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}."
            raise ValueError(f"{name!r} is no command of crop-trl; {remedy}")
        command = import_module(f"{__package__}.{name.replace('-', '_')}")
    # What runs on many processes starts a launcher first.
    return getattr(command, "launched", command.main)(rest)


if __name__ == "__main__":
    sys.exit(main())
