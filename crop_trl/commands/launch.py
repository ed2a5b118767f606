"""Starting accelerate's launcher from a command, with a launch file of ours or any other."""

import logging
import os
import signal
import sys
from pathlib import Path
from subprocess import CalledProcessError

from ..studies.running import end_with_parent
from .options import SentenceParser

FOLDER = Path(__file__).resolve().parents[1] / "accelerate_configs"
# What may stand on the command line beside the options of the command itself, as accelerate knows it.
OPTIONS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids")

_LAUNCHER = "CROP_TRL_LAUNCHER"


def is_launched() -> bool:
    """Whether this process was started by accelerate or torchrun, so that no second launch is due."""
    # Others of their variables may be of a trainer in the process that started this one, such as a notebook.
    return "LOCAL_RANK" in os.environ or "ACCELERATE_USE_CPU" in os.environ


def launch_file(name: str) -> Path:
    """A launch file by name (`zero2`) or path. Raises `ValueError`, listing the names, when there is none."""
    for path in (FOLDER / f"{name}.yaml", Path(name)):
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in FOLDER.glob("*.yaml")))
    raise ValueError(f"`accelerate_config` {name!r} is no launch file: choose one of {names}, or give the path of one.")


def split_options(argv: list[str]) -> tuple[list[str], list[str]]:
    """The options of a launch, as accelerate takes them, and the rest of a command line."""
    parser = SentenceParser("crop-trl train", add_help=False, allow_abbrev=False)
    for name in ("accelerate_config", *OPTIONS):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    found, rest = parser.parse_known_args(argv)
    given = {name: value for name, value in vars(found).items() if value is not None}
    file = given.pop("accelerate_config", None)
    options = [] if file is None else ["--config_file", str(launch_file(file))]
    return [*options, *(word for name, value in given.items() for word in (f"--{name}", value))], rest


def launch(module: str, options: list[str], argv: list[str]) -> None:
    """Run a module of the package in as many processes as the launch says, and end with their status."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        launch_command(launch_command_parser().parse_args([*options, "--module", module, *argv]))
    except CalledProcessError as error:
        _end({0: error.returncode})
    except ChildFailedError as error:
        _end({rank: failure.exitcode for rank, failure in error.failures.items()})
    except (KeyboardInterrupt, SignalException):
        sys.exit(130)


def end_with_launcher() -> None:
    """End this process when its launcher is gone: torchrun's are in sessions of their own, and would go on."""
    launcher = int(os.environ.pop(_LAUNCHER, os.getpid()))
    if launcher != os.getpid():
        end_with_parent(signal.SIGKILL)
        if os.getppid() == 1 != launcher:
            sys.exit("error: The launcher of this process was ended.")


def _end(codes: dict[int, int]) -> None:
    # One that was killed had no time to say so; those that the launcher ends for it are no news.
    for rank, code in codes.items():
        if code < 0 and code != -signal.SIGTERM:
            name = signal.Signals(-code).name
            hint = " (memory of the machine?)" if name == "SIGKILL" else ""
            print(f"error: process {rank} was ended by {name}{hint}.", file=sys.stderr)
    sys.exit(max(1, *codes.values()))
