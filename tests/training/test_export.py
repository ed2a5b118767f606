"""The export of a run: read back it is what was selected, whole files only, and no row twice after a resume."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny import make_trainer

from crop_trl.methods import Selection
from crop_trl.methods.divergence import topk_entropy
from crop_trl.training.callbacks import RolloutCallback, RolloutRecord
from crop_trl.training.export import FOLDER, METADATA_KEY, read_export, write_rollout


class Recorder(RolloutCallback):
    def __init__(self):
        self.rollouts = []

    def on_rollout(self, args, state, control, rollout, **kwargs):
        self.rollouts.append(rollout)


def flat(column):
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False)


@pytest.mark.parametrize("method", ["crop", "tip", "opd"])
def test_read_back_it_is_what_was_selected(tmp_path, method):
    recorder = Recorder()
    make_trainer(tmp_path, method=method, selection_export_steps=1, max_steps=2, callbacks=[recorder]).train()
    table = read_export(tmp_path)
    assert json.loads(table.schema.metadata[METADATA_KEY])["method"] == method
    assert table.column("step").to_pylist() == [0] * 8 + [1] * 8
    assert table.column("row").to_pylist() == list(range(8)) * 2
    assert table.column("original")[0].as_py() == recorder.rollouts[0].rows[0]["prompt"][0]["content"]
    assert table.column("counterfactual")[0].as_py().startswith("what is the sum of")
    tokens = [ids for r in recorder.rollouts for ids in r.completion_ids]
    assert table.column("token_ids").to_pylist() == tokens
    for name, pick in (("kept", lambda r: r.selection.mask), ("loss_mask", lambda r: r.loss_mask)):
        expected = [value for r in recorder.rollouts for value in pick(r)[r.loss_mask].tolist()]
        assert flat(table.column(name)).tolist() == expected
    measures = {"crop": ["semantic_divergence", "surface_divergence"], "tip": ["student_entropy", "forward_kl"]}
    for name in measures.get(method, []):
        expected = torch.cat([r.selection.measures[name][r.loss_mask] for r in recorder.rollouts])
        # Half precision: 11 bits, and steps of 6e-8 near zero.
        np.testing.assert_allclose(flat(table.column(name)).astype(float), expected.numpy(), rtol=5e-4, atol=6e-8)
    if method == "tip":
        expected = torch.cat([topk_entropy(r.signals["student/original"])[r.loss_mask] for r in recorder.rollouts])
        np.testing.assert_allclose(flat(table.column("student_entropy")).astype(float), expected, rtol=5e-4, atol=6e-8)
    assert ("student_entropy" in table.column_names) == (method == "tip")
    assert ("score" in table.column_names) == (method != "opd")


def test_it_is_off_unless_asked_for_and_evaluation_leaves_nothing(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train()
    assert not (tmp_path / FOLDER).exists()
    with pytest.raises(ValueError, match="holds no exported selection; train with `--selection_export_steps 1`"):
        read_export(tmp_path)


def test_a_run_without_export_leaves_no_other_run_in_its_folder(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, selection_export_steps=1, max_steps=2, **settings).train()
    # Resumed without export: the step before the checkpoint is this run's own.
    make_trainer(tmp_path, max_steps=2, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert set(read_export(tmp_path).column("step").to_pylist()) == {0}
    make_trainer(tmp_path, method="opd", max_steps=1).train()
    with pytest.raises(ValueError, match="holds no exported selection"):
        read_export(tmp_path)


def test_every_nth_step(tmp_path):
    make_trainer(tmp_path, selection_export_steps=2, max_steps=3).train()
    assert sorted(set(read_export(tmp_path).column("step").to_pylist())) == [0, 2]
    assert len(read_export(tmp_path, range(2, 3))) == 8
    with pytest.raises(ValueError, match="of these steps"):
        read_export(tmp_path, range(1, 2))


def test_a_resumed_run_holds_no_row_twice(tmp_path):
    """The run goes two steps beyond its checkpoint and is lost there; what it wrote of them makes way."""
    settings = {"selection_export_steps": 1, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    make_trainer(tmp_path, **settings).train()
    folder = tmp_path / FOLDER
    # As if more processes had taken part before the crash, and one had died while writing.
    (folder / "step_000003.process_001.parquet").write_bytes((folder / "step_000003.process_000.parquet").read_bytes())
    (folder / ".step_000003.process_002.parquet.partial").write_bytes(b"half")
    before = read_export(tmp_path)
    assert len(before) == 5 * 8
    make_trainer(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    after = read_export(tmp_path)
    places = list(zip(after.column("step").to_pylist(), after.column("row").to_pylist()))
    assert places == [(step, row) for step in range(4) for row in range(8)]
    assert not list(folder.glob(".*"))
    # The same weights, prompts and seed sample the same responses again.
    assert after.column("token_ids").to_pylist() == before.slice(0, 32).column("token_ids").to_pylist()


def test_a_step_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / FOLDER).write_text("in the way")
    trainer = make_trainer(tmp_path, selection_export_steps=1, max_steps=2)
    with pytest.warns(UserWarning, match=r"step_000000\S+ cannot be written \(\S.*\) and is missing"):
        trainer.train()
    assert trainer.state.global_step == 2 and (tmp_path / FOLDER).read_text() == "in the way"


def test_steps_of_several_methods_are_not_taken_for_one(tmp_path):
    """A run that is resumed with another method leaves both in its folder."""
    settings = {"selection_export_steps": 1, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, method="opd", max_steps=1, **settings).train()
    resumed = make_trainer(tmp_path, method="crop", max_steps=2, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    with pytest.raises(
        ValueError, match=r"several methods, 'opd' from step_000000\S* on, 'crop' from step_000001\S* on"
    ):
        read_export(tmp_path)
    assert "score" in read_export(tmp_path, range(1, 2)).column_names
    assert "score" not in read_export(tmp_path, range(1)).column_names


@pytest.mark.parametrize("kind", ["cut off", "empty", "another parquet file"])
def test_a_damaged_file_is_named(tmp_path, kind):
    make_trainer(tmp_path, selection_export_steps=1, max_steps=1).train()
    path = tmp_path / FOLDER / "step_000000.process_000.parquet"
    if kind == "another parquet file":
        pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    else:
        path.write_bytes(path.read_bytes()[: 900 if kind == "cut off" else 0])
    with pytest.raises(
        ValueError, match=r"step_000000\.process_000\.parquet' is no export that can be read .*; delete it"
    ):
        read_export(tmp_path)


def test_a_long_rollout_costs_a_few_bytes_a_token(tmp_path):
    """Values spread as a teacher's are (most next to zero), 16 responses of up to 2,000 tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(400, 2000, size=16)
    width = int(lengths.max())
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]

    def divergence():
        return torch.tensor(np.exp(rng.normal(-7, 2.5, size=(16, width))).clip(0, 0.69), dtype=torch.float32)

    semantic, surface = divergence(), divergence()
    ids = [(rng.zipf(1.3, size=n) % 150_000).tolist() for n in lengths]
    selection = Selection(
        torch.tensor(rng.random((16, width)) < 0.2) & mask,
        semantic - surface,
        None,
        semantic,
        {"semantic_divergence": semantic, "surface_divergence": surface},
    )

    rows = [{"prompt": "A problem of some length, as they are.", "counterfactual_prompt": "Another one."}] * 16
    record = RolloutRecord(0, rows, ids, ids, mask, {}, None, 0, selection)
    path = tmp_path / FOLDER / "step_000000.process_000.parquet"
    write_rollout(record, path, {"method": "crop"})
    per_token = path.stat().st_size / lengths.sum()
    assert per_token < 9, per_token
    assert pq.read_metadata(path).num_rows == 16


@pytest.mark.slow
@pytest.mark.multiprocess
def test_each_process_writes_its_own_rows(tmp_path):
    script = Path(__file__).parents[1] / "scripts" / "exporting.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(script), str(tmp_path), "2"], env=environment, check=True)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [
        f"step_00000{step}.process_00{process}.parquet" for step in (0, 1) for process in (0, 1)
    ]
    table = read_export(tmp_path)
    places = list(zip(table.column("step").to_pylist(), table.column("row").to_pylist()))
    assert places == [(step, row) for step in (0, 1) for row in range(8)]
