"""What a run kept, token by token: a parquet file for each step and process, one row a response, numbers as lists."""

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..files import replacing
from .callbacks import RolloutCallback, RolloutRecord

if TYPE_CHECKING:
    import pyarrow

FOLDER = "selection"
METADATA_KEY = b"crop_trl"
SAID = "row/"  # before what the dataset says of a response beside its prompts
_NAME = re.compile(r"step_(\d+)\.process_(\d+)\.parquet")
# The largest number that half precision holds.
_LIMIT = 65504.0


class SelectionExport(RolloutCallback):
    """Writes every n-th step to `selection/` in a run's folder; 0: none, and what an earlier run left there goes."""

    def __init__(self, folder: str | Path, every: int = 1):
        self.folder = Path(folder) / FOLDER
        self.every = every

    def on_train_begin(self, args, state, control, **kwargs):
        # A resumed run goes through the steps after its checkpoint again, perhaps on fewer processes; a new run in an
        # old folder goes through all of them. Kept by a run that exports nothing, they would be read as that run's.
        if state.is_local_process_zero:
            for path, step, _ in _files(self.folder):
                if step >= state.global_step:
                    path.unlink(missing_ok=True)
            for path in self.folder.glob(".*.partial"):
                path.unlink(missing_ok=True)

    def on_rollout(self, args, state, control, rollout: RolloutRecord, **kwargs):
        if self.every and rollout.step % self.every == 0:
            path = self.folder / f"step_{rollout.step:06d}.process_{args.process_index:03d}.parquet"
            settings = {"method": args.method, **asdict(args.selection_settings), "score_top_k": args.score_top_k}
            settings["tokenizer"] = rollout.tokenizer.name_or_path
            settings["counterfactuals"] = rollout.signals.most("counterfactual")
            try:
                write_rollout(rollout, path, settings)
            except OSError as error:
                # The run is worth more than one file of it.
                warnings.warn(
                    f"{str(path)!r} cannot be written ({error.strerror or error}) and is missing.", stacklevel=2
                )


def write_rollout(rollout: RolloutRecord, path: str | Path, settings: dict) -> None:
    """Write one batch of rollouts, whole or not at all: the text of each kind of prompt, `step`, `row` (place in the
    global batch), `row/answer` and `row/solution` where rows have them, `advantage` and a `reward/NAME` for each reward
    function, and lists with one element per response token: `token_ids`, `loss_mask`, `kept`, `score` and every measure
    (half precision, cut off at +-65504). `settings` go to the file's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lengths = np.array([len(ids) for ids in rollout.completion_ids], dtype=np.int32)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    real = np.arange(rollout.loss_mask.size(1))[None] < lengths[:, None]

    def column(values: np.ndarray, kind):
        element = pa.field("element", kind, nullable=False)
        return pa.ListArray.from_arrays(offsets, pa.array(values, kind), type=pa.list_(element))

    def halves(value: torch.Tensor):
        value = value.detach().float().clamp(-_LIMIT, _LIMIT).half().cpu().numpy()
        return column(value[real], pa.float16())

    ids = np.fromiter((i for ids in rollout.completion_ids for i in ids), dtype=np.int32, count=int(lengths.sum()))
    rewards = {f"reward/{name}": value for name, value in rollout.rewards.items()}
    if rewards:
        rewards["advantage"] = rollout.advantages
    said = {f"{SAID}{name}": [row.get(name) for row in rollout.said] for name in ("answer", "solution")}
    texts = {**rollout.texts, **{name: each for name, each in said.items() if any(each)}}
    columns = {
        **{name: pa.array(each, pa.string()) for name, each in texts.items()},
        "step": pa.array(np.full(len(lengths), rollout.step, dtype=np.int32)),
        "row": pa.array(rollout.first_row + np.arange(len(lengths), dtype=np.int32)),
        **{name: pa.array(value.float().cpu().numpy(), pa.float32()) for name, value in rewards.items()},
        "token_ids": column(ids, pa.int32()),
        "loss_mask": column(rollout.loss_mask.bool().cpu().numpy()[real], pa.bool_()),
        "kept": column(rollout.selection.mask.bool().cpu().numpy()[real], pa.bool_()),
    }
    numbers = dict(rollout.selection.measures)
    if rollout.selection.scores is not None:
        numbers["score"] = rollout.selection.scores
    if rollout.student_entropy is not None:
        numbers["student_entropy"] = rollout.student_entropy
    columns.update({name: halves(value) for name, value in numbers.items()})
    table = pa.table(columns).replace_schema_metadata({METADATA_KEY: json.dumps(settings)})
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        pq.write_table(
            table,
            partial,
            compression="zstd",
            compression_level=9,
            # Neighbouring numbers share their exponents: the bytes of one significance compress far better together.
            use_byte_stream_split=[f"{name}.list.element" for name in numbers],
            use_dictionary=[*texts, "token_ids.list.element"],
            store_schema=True,
        )


def read_export(folder: str | Path, steps: Sequence[int] | range | None = None) -> "pyarrow.Table":
    """
    Read what a run exported.

    Args:
        folder (`str` or `Path`): The run's output folder.
        steps (sequence of `int`, *optional*): Global steps to read; by default all.

    Returns:
        `pyarrow.Table`, ordered by step and row; its schema's metadata holds the run's settings as JSON.

    Raises:
        `ValueError`: there is nothing of these steps, a file is damaged, or the steps are of several methods.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = [
        path
        for path, step, _ in sorted(_files(Path(folder) / FOLDER), key=lambda f: f[1:])
        if steps is None or step in steps
    ]
    if not found:
        raise ValueError(
            f"{str(folder)!r} holds no exported selection{'' if steps is None else ' of these steps'}; train with "
            "`--selection_export_steps 1`."
        )
    tables, methods = [], {}
    for path in found:
        try:
            tables.append(pq.read_table(path))
            methods.setdefault(json.loads(tables[-1].schema.metadata[METADATA_KEY])["method"], path.name)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is no export that can be read ({error}); delete it.") from error
    if len(methods) > 1:
        # A run that was resumed with another method; its columns and what they mean change from there on.
        parts = ", ".join(f"{method!r} from {name} on" for method, name in methods.items())
        raise ValueError(f"{str(folder)!r} holds steps of several methods, {parts}; read one's with `steps`.")
    metadata = tables[-1].schema.metadata
    return pa.concat_tables(tables, promote_options="default").replace_schema_metadata(metadata)


def exported_steps(folder: str | Path) -> list[int]:
    """Steps that a run exported."""
    return sorted({step for _, step, _ in _files(Path(folder) / FOLDER)})


def _files(folder: Path) -> list[tuple[Path, int, int]]:
    """Exported files with their step and process."""
    if not folder.is_dir():
        return []
    matches = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    return [(path, int(match[1]), int(match[2])) for path, match in matches if match]
