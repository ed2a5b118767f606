"""Which checkpoint a run goes on from, and what keeps it from going on as if it had never stopped."""

import json
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import FileSystemReader
from transformers.trainer_utils import get_last_checkpoint

from ..models.sharding import launch_kind
from .prompt_order import order_troubles

# Where each way of sharing keeps the states of the optimizer.
_OPTIMIZER = {"plain": ("optimizer.pt",), "deepspeed": ("global_step*",), "fsdp": ("optimizer_*", "optimizer.bin")}
# What a trainer reads of the state that it wrote, and of which type.
_STATE = {
    "global_step": int,
    "epoch": (int, float),
    "log_history": list,
    "stateful_callbacks": dict,
    "train_batch_size": int,
}
_WHOLE = "give the folder of a whole checkpoint"
_AS_WRITTEN = f"{_WHOLE}, launched as it was written"


def checkpoint_to_resume(given: str | bool | None, args, rows=None, adapter: bool | None = None) -> str | None:
    """
    The checkpoint that a run goes on from.

    Some of what is missing would be passed over in silence: without the optimizer's states, a run takes new ones.

    Args:
        given (`str` or `bool`, *optional*): A checkpoint's folder, or true for the last in the run's folder.
        args ([`~crop_trl.CROPConfig`]): Of the run.
        rows (`datasets.Dataset`, *optional*): The training rows; without them, only settings are compared.
        adapter (`bool`, *optional*): Whether the run trains an adapter; `None` where that is not known yet.

    Returns:
        `str` or `None`: Its folder; `None` for a run from the start.

    Raises:
        `ValueError`: there is none, it is one of several runs in the run's folder, a file of it is missing or cut off,
        it is of another number of processes, another way of sharing or another kind of student, its steps took other
        prompts than those of this run would, or it leaves no step to make.
    """
    if given is None or str(given).lower() == "false":
        return None
    if str(given).lower() == "true":
        given = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
        if given is None:
            raise ValueError(f"`resume_from_checkpoint` finds no checkpoint in `output_dir` {args.output_dir!r}.")
        _check_one_run(Path(given))
    folder = Path(given)
    if not folder.is_dir():
        raise ValueError(
            f"`resume_from_checkpoint` {str(given)!r} is no folder; give a checkpoint's, or true for the last."
        )
    for trouble in _troubles(folder, args, rows, adapter):
        raise ValueError(f"`resume_from_checkpoint` {str(given)!r} {trouble}.")
    return str(folder)


def _read_state(folder: Path) -> dict[str, Any] | None:
    """The trainer's state in a checkpoint; `None` where there is none that a trainer could read."""
    try:
        state = json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return None
    sound = isinstance(state, dict) and all(isinstance(state.get(name), kind) for name, kind in _STATE.items())
    return state if sound else None


def _check_one_run(last: Path) -> None:
    """
    Raise `ValueError` when the last checkpoint of a folder and another are not of one run.

    A run that starts anew in an old folder has lower numbers at first than what the old one left. Times tell nothing,
    since copies change them; but what a run had logged at one checkpoint is the beginning of what it had at the next.
    """
    state = _read_state(last)
    if state is None:
        return
    # As text, in which a value that is no number equals itself.
    logged = [json.dumps(entry, sort_keys=True) for entry in state["log_history"]]
    for other in sorted(last.parent.glob("checkpoint-*")):
        earlier = _read_state(other) if re.fullmatch(r"checkpoint-\d+", other.name) and other != last else None
        if earlier is None:
            continue
        begun = [json.dumps(entry, sort_keys=True) for entry in earlier["log_history"]]
        if logged[: len(begun)] != begun:
            raise ValueError(
                f"`resume_from_checkpoint` true would take {str(last)!r}, but {other.name} beside it is of another "
                "run, which logged other values; give the folder of the one to go on from, or delete the other's."
            )


def _troubles(folder: Path, args, rows, adapter: bool | None) -> Iterator[str]:
    """What keeps a run from going on from a folder as if it had never stopped, and what to do."""
    state = _read_state(folder)
    if state is None:
        yield f"holds no trainer_state.json that can be read; {_WHOLE}"
        return
    kind = launch_kind(args)
    parts = {
        "weights": ("*.safetensors", "pytorch_model*", "global_step*"),
        f"optimizer states of a {kind} launch": _OPTIMIZER[kind],
        "learning-rate schedule": ("scheduler.pt",),
        "random states": ("rng_state*.pth",),
    }
    for part, patterns in parts.items():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            yield f"holds no {part}; {_AS_WRITTEN}"
    yield from _process_troubles(folder, args)
    if kind == "deepspeed":
        yield from _deepspeed_troubles(folder, args)
    yield from _student_troubles(folder, adapter)
    yield from order_troubles(folder, args, rows)
    for name in _missing(folder):
        yield f"holds no {name}, which is a part of it; {_AS_WRITTEN}"
    for path in _cut_off(folder):
        yield f"is damaged, {path.name} is cut off; {_WHOLE}"
    if 0 < args.max_steps <= state["global_step"]:
        yield f"is at step {state['global_step']}, and `max_steps` {args.max_steps} leaves none to make; raise it"


def _ranks_here(args) -> range:
    """The processes of this machine."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    first = args.process_index - args.local_process_index
    return range(first, first + here)


def _process_troubles(folder: Path, args) -> Iterator[str]:
    saved, size = {path.name for path in folder.glob("rng_state*.pth")}, args.world_size
    # On machines that share no disk, each holds those of its own processes.
    wanted = [{"rng_state.pth"} if size == 1 else {f"rng_state_{rank}.pth" for rank in range(size)}]
    if size > 1:
        wanted.append({f"rng_state_{rank}.pth" for rank in _ranks_here(args)})
    if saved in wanted:
        return
    if len(saved) == size and size > 1:
        yield f"holds no {min(wanted[0] - saved)}, which is a part of it; {_AS_WRITTEN}"
    yield (
        f"holds the states of {len(saved)} process{'es' * (len(saved) > 1)}, and this run has {size}; launch as many, "
        "or start a new run from its weights (`model_name_or_path`)"
    )


def _student_troubles(folder: Path, adapter: bool | None) -> Iterator[str]:
    # Named adapters have folders of their own; a checkpoint in FSDP's shards holds neither file.
    held = any(path for pattern in ("adapter_config.json", "*/adapter_config.json") for path in folder.glob(pattern))
    if held and adapter is False:
        yield "holds an adapter, and this run trains the whole model; set `peft_config` (`use_peft`) as it was"
    if adapter and not held and (folder / "config.json").exists():
        yield (
            "holds a whole model, and this run trains an adapter (`peft_config`); leave that off, or start a new run "
            "from its weights (`model_name_or_path`)"
        )


def _deepspeed_troubles(folder: Path, args) -> Iterator[str]:
    """Each process reads its own part of the optimizer: without one, it fails while the others wait for it."""
    try:
        shards = folder / (folder / "latest").read_text().strip()
    except (OSError, ValueError):
        yield f"holds no file `latest`, which names its DeepSpeed part; {_AS_WRITTEN}"
        return
    stage = args.deepspeed_plugin.zero_stage
    # Stage 3 splits the weights as well, so that each process has a file of them.
    split = any(shards.glob("zero_pp_rank_*_model_states.pt"))
    if split != (stage == 3) and (split or any(shards.glob("mp_rank_*_model_states.pt"))):
        yield (
            f"was written under ZeRO-{'3' if split else '1 or 2'}, and this run launches ZeRO-{stage}, which splits "
            "other parts; launch as it was written, or start a new run from its weights (`model_name_or_path`)"
        )
    parts = [] if split else [("weights", "mp_rank_*_model_states.pt")]
    for path in sorted(folder.glob("rng_state*.pth")):
        rank = "0" if path.stem == "rng_state" else path.stem.rpartition("_")[2]
        if split:
            parts.append((f"weights of process {rank}", f"zero_pp_rank_{rank}_mp_rank_*_model_states.pt"))
        parts.append((f"optimizer states of process {rank}", f"*zero_pp_rank_{rank}_mp_rank_*_optim_states.pt"))
    for part, pattern in parts:
        if not any(shards.glob(pattern)):
            yield f"holds no {part} in {shards.name}; {_AS_WRITTEN}"


def _missing(folder: Path) -> Iterator[str]:
    """Files that a table of contents names and that are not there."""
    for index in sorted(folder.glob("*.index.json")):
        try:
            files = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            yield f"{index.name} that can be read"
            return
        yield from sorted(name for name in files if not (folder / name).exists())
    for shards in _torch_shards(folder):
        if not (shards / ".metadata").exists():
            yield f"{shards.name}/.metadata"
        files = {name for name, _ in _contents(shards)}
        yield from sorted(f"{shards.name}/{name}" for name in files if not (shards / name).exists())


def _cut_off(folder: Path) -> Iterator[Path]:
    """Files that do not end where they should. Only tables of contents are read: a wrong byte is not seen."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, "np"):
                    pass
            except (SafetensorError, OSError):
                yield path
        elif path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path):
            yield path
    for shards in _torch_shards(folder):
        contents = _contents(shards)
        if not contents:
            yield shards / ".metadata"
        yield from (shards / name for name, end in contents if (shards / name).stat().st_size < end)


def _torch_shards(folder: Path) -> list[Path]:
    """The folders of a checkpoint in which FSDP keeps a file for each process."""
    return [path for name in ("optimizer_*", "pytorch_model_fsdp_*") for path in folder.glob(name) if path.is_dir()]


def _contents(shards: Path) -> list[tuple[str, int]]:
    """Name of a file and where a tensor ends in it, for all tensors; empty where the table of contents is not whole."""
    try:
        stored = FileSystemReader(shards).read_metadata().storage_data
    except (OSError, EOFError, pickle.UnpicklingError):
        return []
    return [(place.relative_path, place.offset + place.length) for place in stored.values()]
