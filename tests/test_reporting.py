"""What a run reports: grouped metrics, histograms, coloured responses and the method's card, read back from disk."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_tokenizer, make_trainer

from crop_trl import CROPConfig
from crop_trl.callbacks import RolloutCallback, RolloutRecord
from crop_trl.cards import method_card
from crop_trl.methods import METHODS, Selection
from crop_trl.reporting import (
    ExampleResponse,
    example_responses,
    group_metrics,
    histograms,
    report_rollouts,
)

SECRET = "hf_SECRETSECRET"


class Recorder(RolloutCallback):
    def __init__(self):
        self.rollouts = []

    def on_rollout(self, args, state, control, rollout, **kwargs):
        self.rollouts.append(rollout)


def train(folder, backend):
    recorder = Recorder()
    trainer = make_trainer(
        folder,
        report_to=[backend],
        max_steps=3,
        method="tip",
        callbacks=[recorder],
        model_init_kwargs={"token": SECRET},
        run_settings={"dataset_name": "some triplets"},
    )
    (placed,) = report_rollouts(trainer)
    assert placed.lower().startswith(backend)
    trainer.train()
    return trainer, recorder


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer, recorder = train(tmp_path / "out", "wandb")
    wandb.finish()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert SECRET not in printed and SECRET.encode() not in next(folder.glob("*.wandb")).read_bytes()
    records = [json.loads(line) for line in printed.splitlines()]
    config = {}
    for record in records:
        if record["type"] == "config":
            config.update(record["config"]["update"])
    assert config["method"] == "tip" and config["dataset_name"] == "some triplets"
    assert config["method_card"]["Ranked by"].startswith("Uncertain or in disagreement")
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    # Rows that TRL writes to time its own functions are left out.
    rows = [row for row in rows if not any(name.startswith("profiling/") for name in row)]
    metrics = [row for row in rows if "train/loss" in row]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [row["train/global_step"] for row in metrics] == [1, 2, 3]
    for row, entry in zip(metrics, logged):
        for name in ("selection/retention_ratio", "scoring/residual_mass", "distillation/gap_kept", "entropy"):
            key = name if "/" in name else f"train/{name}"
            assert row[key] == pytest.approx(entry[name])
    sections = {name.split("/")[0] for name in metrics[0] if not name.startswith("_")}
    assert {"train", "selection", "scoring", "distillation", "completions", "seconds", "rewards"} <= sections
    assert not any(name.startswith("train/selection") for name in metrics[0])
    drawn = [row for row in rows if "histograms/student_entropy._type" in row]
    assert [row["train/global_step"] for row in drawn] == [1, 2, 3]
    for row, rollout in zip(drawn, recorder.rollouts):
        counts = row["histograms/score_kept.values"]
        counts = json.loads(counts) if isinstance(counts, str) else counts
        assert sum(counts) == int(rollout.selection.mask.sum())
    # The table's HTML lies in an artifact, on disk until it is sent.
    artifacts = [record["artifact"] for record in records if record["type"] == "artifact"]
    assert len(artifacts) == 3
    files = {entry["path"]: Path(entry["local_path"]) for entry in artifacts[0]["manifest"]["contents"]}
    table = json.loads(files["rollouts/responses.table.json"].read_text())
    assert table["columns"] == ["step", "prompt", "response", "kept share"] and len(table["data"]) == 4
    first = recorder.rollouts[0]
    page = files[table["data"][0][2]["path"]].read_text()
    assert page.count("box-shadow") == int(first.selection.mask[0].sum())
    assert table["data"][0][1] == first.rows[0]["prompt"][0]["content"]


def test_tensorboard(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer, recorder = train(tmp_path / "out", "tensorboard")
    assert all(SECRET.encode() not in path.read_bytes() for path in (tmp_path / "tb").iterdir())
    events = accumulator.EventAccumulator(str(tmp_path / "tb"), size_guidance={"histograms": 0})
    events.Reload()
    read = [event.value for event in events.Scalars("selection/retention_ratio")]
    assert read == pytest.approx([e["selection/retention_ratio"] for e in trainer.state.log_history[:3]])
    assert (
        "train/loss" in events.Tags()["scalars"] and "train/selection/retention_ratio" not in events.Tags()["scalars"]
    )
    drawn = events.Histograms("histograms/score_kept")
    assert [event.step for event in drawn] == [1, 2, 3]
    assert [event.histogram_value.num for event in drawn] == [int(r.selection.mask.sum()) for r in recorder.rollouts]
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "| Method | tip |" in texts["method_card/text_summary"]
    assert "| dataset_name | some triplets |" in texts["settings/text_summary"]
    assert "**" in texts["rollouts/response_1/text_summary"]


def test_trackio(tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    # Read when trackio is imported.
    for module in (trackio.sqlite_storage, trackio.utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    train(tmp_path / "out", "trackio")
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = [json.loads(row) for (row,) in connection.execute("select metrics from metrics")]
    assert SECRET.encode() not in database.read_bytes()
    metrics = [row for row in rows if "train/loss" in row]
    assert [row["train/global_step"] for row in metrics] == [1, 2, 3] and "selection/retention_ratio" in metrics[0]
    assert sum("histograms/score_kept" in row for row in rows) == 3
    (card,) = [row["method_card"]["_value"] for row in rows if "method_card" in row]
    assert "| Method | tip |" in card
    assert any("rollouts/responses" in row for row in rows)


def test_metrics_that_name_a_group_keep_it():
    logs = {"loss": 1, "selection/x": 2, "eval_selection/x": 3, "eval_loss": 4}
    assert group_metrics(logs) == ({"selection/x": 2}, {"loss": 1, "eval_selection/x": 3, "eval_loss": 4})


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_card(tmp_path, method):
    card = method_card(CROPConfig(str(tmp_path), method=method, use_cpu=True, bf16=False), {"dataset": "d", "x": None})
    assert card["Method"] == method and card["Dataset"] == "d" and "X" not in card
    assert (card["Trained tokens"] == "all") == (METHODS[method].score is None)
    assert all(card.values())


def test_secrets_reach_no_log(tmp_path):
    args = CROPConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        teacher_init_kwargs={"token": SECRET, "dtype": "float32"},
        model_init_kwargs={"nested": {"api_key": SECRET}, "token": SECRET},
    )
    assert SECRET not in args.to_json_string() and SECRET not in str(args.to_dict())
    assert args.to_dict()["teacher_init_kwargs"]["dtype"] == "float32"
    assert args.teacher_init_kwargs["token"] == SECRET


def record(rows=8, width=6):
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[0, 3:] = False
    kept = torch.zeros_like(mask)
    kept[:, 1] = True
    scores = torch.arange(rows * width).view(rows, width).float()
    scores[-1, -1] = float("nan")
    ids = [[5 + i] * int(mask[i].sum()) for i in range(rows)]
    selection = Selection(kept, scores, None, scores)
    dataset = [{"prompt": f"problem {i}"} for i in range(rows)]
    return RolloutRecord(3, 0, ids, mask, selection, {}, dataset, make_tokenizer())


def test_histograms_hold_the_tokens_they_name():
    found = histograms(record())
    assert found["histograms/score"].size == 8 * 6 - 3 - 1
    np.testing.assert_array_equal(found["histograms/score_kept"], np.arange(8) * 6.0 + 1)
    np.testing.assert_allclose(found["histograms/position_kept"], [1 / 3] + [1 / 6] * 7)
    assert "histograms/student_entropy" not in found


def test_examples_are_spread_over_the_batch():
    assert [e.prompt for e in example_responses(record())] == [f"problem {i}" for i in (0, 2, 4, 6)]
    assert [e.prompt for e in example_responses(record(rows=1))] == ["problem 0"]
    assert len(example_responses(record())[0].pieces) == 3


def test_a_response_cannot_write_html_or_markdown_of_its_own():
    pieces = ["<script>alert(1)</script>", "\n", " **x**", "\ud800", "\x1b[31m", "", " y"]
    scores = [1.0, 0.0, -1.0, float("nan"), float("inf"), 0.0, 0.02]
    example = ExampleResponse("<b>", pieces, [True, False, True, False, False, True, False], scores)
    page = example.to_html()
    assert "<script>" not in page and "<b>" not in page and page.count("box-shadow") == 3
    assert "\x1b" not in page
    page.encode()
    text = example.to_markdown()
    assert "<script>" not in text.replace("\\<", "") and text.encode()


def test_a_long_response_stays_small():
    rng = np.random.default_rng(0)
    scores = (np.exp(rng.normal(-7, 2, size=4096)).clip(0, 0.69)).tolist()
    cut = sorted(scores)[-819]
    example = ExampleResponse("p", [" token"] * 4096, [s >= cut for s in scores], scores)
    assert len(example.to_html()) < 200_000
