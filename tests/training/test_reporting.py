"""What a run reports: grouped metrics, histograms, coloured responses and the method's card, read back from disk."""

import argparse
import copy
import html
import json
import pickle
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_rows, make_tokenizer, make_trainer
from viewer.pages import unpacked

from crop_trl import CROPConfig
from crop_trl.checks import check_packages
from crop_trl.methods import METHODS, Selection
from crop_trl.runs import save_view
from crop_trl.text import masked_arguments
from crop_trl.training.callbacks import RolloutCallback, RolloutRecord
from crop_trl.training.cards import card_table, method_card
from crop_trl.training.reporting import (
    ExampleResponse,
    RunReports,
    TensorBoardReports,
    TrackioReports,
    example_responses,
    feeds_logged_step,
    group_metrics,
    histograms,
    start_reports,
)

SECRET = "hf_SECRETSECRET"


class Recorder(RolloutCallback):
    def __init__(self):
        self.rollouts = []

    def on_rollout(self, args, state, control, rollout, **kwargs):
        self.rollouts.append(rollout)


def train(folder, backend, evaluate=False):
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
    # The trainer put its own callback in place of the standard one.
    (report,) = (c for c in trainer.callback_handler.callbacks if backend in type(c).__name__.lower())
    assert isinstance(report, RunReports)
    if evaluate:
        trainer.evaluate(make_rows(4))
    trainer.train()
    trainer.save_model()
    assert SECRET.encode() not in (folder / "training_args.bin").read_bytes()
    return trainer, recorder


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub_token", SECRET, "--seed", "7"])
    trainer, recorder = train(tmp_path / "out", "wandb")
    save_view(trainer, tmp_path / "out")
    wandb.finish()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert '"--hub_token","<hidden>","--seed","7"' in printed.encode().decode("unicode_escape").replace(" ", "")
    assert SECRET not in printed and SECRET.encode() not in next(folder.glob("*.wandb")).read_bytes()
    records = [json.loads(line) for line in printed.splitlines()]
    config = {}
    for record in records:
        if record["type"] == "config":
            config.update(record["config"]["update"])
    assert config["method"] == "tip" and config["dataset_name"] == "some triplets"
    assert config["method_card"]["Ranked by"].startswith("How unsure the student is, or how far from the teacher: ")
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
    *artifacts, page = artifacts
    assert len(artifacts) == 3 and page["type"] == "page"
    (file,) = page["manifest"]["contents"]
    facts, _ = unpacked(Path(file["local_path"]).read_text())
    assert file["path"] == "view.html" and facts["method"] == "tip" and len(facts["answers"]) == 32
    assert ["dataset name", "some triplets"] in facts["about"]
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


def test_tensorboard_shows_an_evaluation_without_training(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = make_trainer(tmp_path / "out", report_to="tensorboard", method="opd", eval_dataset=make_rows(4))
    trainer.evaluate()
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    assert "eval/loss" in events.Tags()["scalars"]


def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    # Read when trackio is imported, by module.
    places = {"TRACKIO_DIR": tmp_path / "trackio", "MEDIA_DIR": tmp_path / "trackio" / "media"}
    places["ARTIFACTS_DIR"] = tmp_path / "trackio" / "artifacts"
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "trackio"]:
        for name, place in places.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, place)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trainer, recorder = train(tmp_path / "out", "trackio", evaluate=True)
    # After training, too, the trainer measures and logs.
    trainer.evaluate(make_rows(4))
    (report,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, TrackioReports))
    save_view(trainer, tmp_path / "out")
    report.close()
    report.close()
    blobs = [path.read_bytes() for path in (tmp_path / "trackio/artifacts").rglob("*") if path.is_file()]
    assert blobs == [(tmp_path / "out/view.html").read_bytes()]
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        runs, steps, rows = zip(*connection.execute("select run_name, step, metrics from metrics"))
    rows = [json.loads(row) for row in rows]
    # The axis of its charts counts updates, whatever is logged.
    for name in ("train/loss", "selection/retention_ratio", "histograms/score_kept", "rollouts/response_1"):
        assert [step for step, row in zip(steps, rows) if name in row] == [1, 2, 3]
    assert [step for step, row in zip(steps, rows) if "eval/loss" in row] == [0, 3]
    assert len(set(runs)) == 1
    assert SECRET.encode() not in database.read_bytes()
    metrics = [row for row in rows if "train/loss" in row]
    assert [row["train/global_step"] for row in metrics] == [1, 2, 3] and "selection/retention_ratio" in metrics[0]
    assert sum("histograms/score_kept" in row for row in rows) == 3
    media = tmp_path / "trackio" / "media"
    (card,) = [row["method_card"] for row in rows if "method_card" in row]
    assert ">tip</td>" in (media / card["file_path"]).read_text()
    first, *_ = [row for row in rows if "rollouts/response_1" in row]
    kept = recorder.rollouts[0].selection.mask[0]
    assert (media / first["rollouts/response_1"]["file_path"]).read_text().count("box-shadow") == int(kept.sum())


def test_metrics_that_name_a_group_keep_it():
    logs = {"loss": 1, "selection/x": 2, "eval_selection/x": 3, "eval_loss": 4}
    assert group_metrics(logs) == ({"selection/x": 2}, {"loss": 1, "eval_selection/x": 3, "eval_loss": 4})


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_card(tmp_path, method):
    card = method_card(CROPConfig(str(tmp_path), method=method, use_cpu=True, bf16=False), {"dataset": "d", "x": None})
    assert card["Method"] == method and card["Dataset"] == "d" and "X" not in card
    assert (card["Kept tokens"] == "all") == (not METHODS[method].chooses)
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


def test_secrets_reach_no_file_beside_the_model(tmp_path):
    args = CROPConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        hub_token=SECRET,
        teacher_init_kwargs={"token": SECRET, "dtype": "float32", "headers": {"Authorization": SECRET}},
    )
    written = pickle.dumps(args)
    assert SECRET.encode() not in written
    # Written by this test.
    read = pickle.loads(written)
    assert read.hub_token is None and read.learning_rate == args.learning_rate
    assert read.teacher_init_kwargs["dtype"] == "float32"
    assert copy.deepcopy(args).hub_token == SECRET and copy.deepcopy(args).teacher_init_kwargs["token"] == SECRET


def test_secrets_reach_no_message(tmp_path):
    fields = {"teacher_init_kwargs": {"token": SECRET}, "teacher_server_urls": ["http://host/v1"]}
    for changed in (
        {},
        {"teacher_init_kwargs": None, "teacher_server_urls": [f"ftp://me:{SECRET}@host"]},
        {"teacher_init_kwargs": f'{{"token": "{SECRET}"'},
        {"teacher_init_kwargs": f'["{SECRET}"]'},
    ):
        with pytest.raises(ValueError, match="`teacher_") as refused:
            CROPConfig(str(tmp_path), use_cpu=True, bf16=False, **{**fields, **changed})
        assert SECRET not in str(refused.value)


def test_secrets_of_a_command_line_are_hidden():
    given = ["train.py", "--hub_token", SECRET, f"--hub-token={SECRET}", "--seed", "1", "--name", "x", "-1", "--flag"]
    given += ["--teacher_init_kwargs", json.dumps({"token": SECRET, "dtype": "float32"})]
    given += ["--teacher_server_urls", f"http://me:{SECRET}@host/v1", "http://other/v1"]
    shown = masked_arguments(given)
    assert SECRET not in str(shown) and len(shown) == len(given)
    changed = [new for old, new in zip(given, shown) if old != new]
    assert changed[:2] == ["<hidden>", "--hub-token=<hidden>"] and json.loads(changed[2])["dtype"] == "float32"
    assert changed[3] == "http://<hidden>@host/v1" and len(changed) == 4


def test_backends_are_named_with_commas_or_in_a_list(tmp_path):
    for given, names in (("tensorboard,wandb", ["tensorboard", "wandb"]), ("none", []), (["trackio"], ["trackio"])):
        assert CROPConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=given).report_to == names


def test_a_folder_is_not_taken_for_a_package(tmp_path, monkeypatch):
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ValueError, match="`report_to` needs the package trackio, which is not installed"):
        check_packages(CROPConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="trackio"))


def test_a_backend_that_does_not_start_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "file"))
    trainer = make_trainer(tmp_path / "out", report_to="tensorboard")
    with pytest.raises(ValueError, match=r"`report_to` tensorboard does not start \(.*\); set TENSORBOARD_LOGGING_DIR"):
        start_reports(trainer)


def test_a_picture_that_fails_does_not_end_the_run(tmp_path):
    pytest.importorskip("tensorboard")

    class OwnReports(TensorBoardReports):
        def send_responses(self, responses, step):
            self.tb_writer.add_histogram("lengths", [])

    trainer = make_trainer(tmp_path, max_steps=2, callbacks=[OwnReports()])
    with pytest.warns(UserWarning, match=r"OwnReports could not show the rollouts of step 0 \(NotImplemented"):
        trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("updates", [1, 2, 4])
@pytest.mark.parametrize("every", [1, 2, 3, 10])
def test_rollouts_are_shown_where_metrics_are_logged(updates, every):
    args = argparse.Namespace(steps_per_rollout_batch=updates, logging_strategy="steps", logging_first_step=False)
    state = argparse.Namespace(logging_steps=every, max_steps=12, num_train_epochs=3)
    shown = [step for step in range(0, 12, updates) if feeds_logged_step(args, state, step)]
    logged = {step for step in range(1, 13) if step % every == 0} | {12}
    assert shown == sorted({(step - 1) // updates * updates for step in logged})
    args.logging_strategy = "no"
    assert not feeds_logged_step(args, state, 0)
    args.logging_strategy = "epoch"
    assert feeds_logged_step(args, state, 4 - updates) and feeds_logged_step(args, state, 12 - updates)


def test_values_one_rounding_apart_have_a_histogram():
    found = record()
    found.selection.scores[:] = 0.1
    found.selection.scores[0, 0] = torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))
    counts, _ = np.histogram(histograms(found)["histograms/score"], bins=64)
    assert counts.sum() == 8 * 6 - 3 and (counts > 0).sum() == 2


def test_what_is_hidden_is_seen_to_be_hidden():
    assert "| Url | https://&lt;hidden&gt;@host |" in card_table({"Url": "https://<hidden>@host"})


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
    return RolloutRecord(3, dataset, ids, ids, mask, {}, make_tokenizer(), 0, selection)


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
    assert "<" not in example.to_markdown() and example.to_markdown().encode()


def test_tensorboard_shows_a_response_as_it_is():
    to_html = pytest.importorskip("tensorboard.plugin_util").markdown_to_safe_html
    marks = "<td> &lt; $x_1*2*y$ | ~~no~~ `a` [b](c) # 1. \\( <!-- -->"
    pieces = ["<b>", "x", "(1)", "*", marks, "\n", "    - code\n===", "\n\n", "    end", "、答"]
    shown = to_html(ExampleResponse("<p> *p*", pieces, [i < 5 for i in range(len(pieces))], None).to_markdown())
    assert "<code>" not in shown and shown.count("<h") == 1 and "<hr>" in shown and "<li>" not in shown
    prompt, response = (html.unescape(re.sub(r"</?(p|strong)>|<br>", "", part)) for part in shown.split("<hr>"))
    assert prompt.strip() == "<p> *p*"
    assert "".join(response.split()) == "".join("".join(pieces).split())
    assert shown.count("<strong>") == 1 and html.unescape(re.search("<strong>(.*)</strong>", shown, re.S)[1]).endswith(
        marks
    )


def test_the_legend_says_how_strong_the_strongest_colour_is():
    weak = ExampleResponse("p", ["a", "b"], [True, False], [0.0021, -0.01]).to_html()
    assert "the strongest colour is 0.01," in weak
    dense = ExampleResponse("p", ["a", "b"], [True, True], None).to_html()
    assert "Framed: kept.<" in dense and "Blue" not in dense


def test_a_long_response_stays_small():
    rng = np.random.default_rng(0)
    scores = (np.exp(rng.normal(-7, 2, size=4096)).clip(0, 0.69)).tolist()
    cut = sorted(scores)[-819]
    example = ExampleResponse("p", [" token"] * 4096, [s >= cut for s in scores], scores)
    assert len(example.to_html()) < 200_000
