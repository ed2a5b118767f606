"""`crop-trl analyze` on a bank, on a run, and on results; what a user reads for a mistake."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import make_rows, make_tokenizer, make_trainer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from crop_trl.analysis import bank_report
from crop_trl.analysis.bank import RolloutBank, collect_bank
from crop_trl.analysis.inspect import strongest_response, table_heatmap
from crop_trl.analysis.tokens import TokenTable, read_source
from crop_trl.commands import analyze, train
from crop_trl.methods import SelectionSettings
from crop_trl.methods.divergence import topk_entropy
from crop_trl.training.results import RunResult

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bank")
    bank = collect_bank(make_trainer(folder), make_rows(4))
    make_tokenizer().save_pretrained(folder / "student")
    bank.settings = {"model_name_or_path": str(folder / "student")}
    bank.save(folder / "bank.safetensors")
    return bank, folder / "bank.safetensors"


def test_a_bank_as_a_table(bank):
    bank, path = bank
    settings = SelectionSettings(retention_ratio=0.5)
    table = read_source(path, ["tip", "crop"], settings)
    real = bank.loss_mask
    assert table.token_ids.tolist() == bank.completion_ids[real].tolist()
    assert table.lengths.tolist() == real.sum(1).tolist() and len(table) == int(real.sum())
    for name in ("tip", "crop"):
        selection = bank.select(name, settings)
        assert table.kept[name].tolist() == selection.mask[real].tolist()
        np.testing.assert_array_equal(table.scores[name], selection.scores[real].numpy())
    np.testing.assert_array_equal(table.entropy, topk_entropy(bank.signals["student/original"])[real].numpy())
    assert list(table.measures["crop"]) == ["semantic_divergence", "surface_divergence"]
    # Without a choice: the methods that rank.
    assert {"crop", "random"} < set(TokenTable.from_bank(bank).kept) and "opd" not in TokenTable.from_bank(bank).kept


def test_responses_with_tool_tokens_keep_their_places(bank):
    """Tokens that cannot be trained stay in the table: the text around them would not decode without them."""
    bank, _ = bank
    full = bank.loss_mask.sum(1)
    holed = TokenTable.from_bank(
        type(bank)(bank.completion_ids, bank.loss_mask & (bank.completion_ids != 7), bank.signals, bank.rows),
        ["crop"],
    )
    assert len(holed) <= int(full.sum()) and not holed.kept["crop"][~holed.trainable].any()


def test_the_heat_map_of_a_table(bank):
    bank, path = bank
    table = read_source(path, ["crop", "tip", "opd"])
    row = strongest_response(table, "crop")
    scores = bank.select("crop").scores.masked_fill(~bank.loss_mask, -1)
    assert scores[row].max() == scores.max()
    heatmap = table_heatmap(table, make_tokenizer(), method="crop")
    n = int(bank.loss_mask[row].sum())
    assert [name.split(":")[0] for name in heatmap.rows] == ["Semantic", "Surface", "CROP margin"]
    np.testing.assert_allclose(list(heatmap.rows.values())[2], scores[row, :n], atol=1e-6)
    assert heatmap.kept == bank.select("crop").mask[row, :n].tolist()
    assert heatmap.prompts == bank.rows[row]["prompts"] and heatmap.prompts["counterfactual"]
    assert list(table_heatmap(table, make_tokenizer(), method="tip").rows)[-1].startswith("Score: what tip")
    with pytest.raises(ValueError, match="'opd' keeps every token and measures nothing"):
        table_heatmap(table, make_tokenizer(), method="opd")


def test_near_ties_of_an_export_keep_their_order(tmp_path):
    """In half precision the two divergences may differ by another number than the score that was ranked by."""
    semantic, surface = np.array([0.5004, 0.5, 0.5, 0.1]), np.array([0.4998, 0.5, 0.5002, 0.5])
    score = (semantic - surface).astype(np.float16).astype(np.float32)
    half = {"semantic_divergence": semantic.astype(np.float16), "surface_divergence": surface.astype(np.float16)}
    kept, rows = {"crop": score > 1e-4}, [{"prompts": {}}]
    table = TokenTable(np.arange(4), np.array([4]), np.ones(4, bool), kept, {"crop": score}, {"crop": half}, rows=rows)
    margin = list(table_heatmap(table, make_tokenizer()).rows.values())[-1]
    assert margin == score.tolist() != (half["semantic_divergence"] - half["surface_divergence"]).tolist()


def test_every_source_is_decoded_with_its_own_tokenizer(bank, tmp_path, capsys):
    """The same ids of another student, to whom each of them is a number."""
    path = bank[1]
    ids = make_tokenizer().get_vocab().values()
    words = Tokenizer(models.WordLevel({str(i): i for i in ids}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "student")
    second = RolloutBank.load(path)
    second.settings = {"model_name_or_path": str(tmp_path / "student")}
    second.save(tmp_path / "second.safetensors")

    def counts(*sources):
        analyze.main([*map(str, sources), "--methods", "crop", "--output", str(tmp_path / "out")])
        shares = json.loads((tmp_path / "out/categories.json").read_text())["methods"]["all tokens"]
        return {name: round(share * shares["tokens"]) for name, share in shares["shares"].items()}

    apart = [counts(path), counts(tmp_path / "second.safetensors")]
    assert apart[0] != apart[1]
    for sources in ([path, tmp_path / "second.safetensors"], [tmp_path / "second.safetensors", path]):
        assert counts(*sources) == {name: apart[0][name] + apart[1][name] for name in apart[0]}


def test_the_table_of_a_replay(bank):
    bank, _ = bank
    printed = bank_report.bank_report(bank, SelectionSettings(), make_tokenizer())
    assert "-0.000" not in printed and bank_report.fixed(-0.0004) == "0.000"
    assert bank_report.fixed(-0.0006) == "-0.001"
    assert "likelier than the teacher by more than 2 nats" in printed


def test_a_bank_from_the_command_line(bank, tmp_path, capsys):
    arguments = ["--methods", "crop", "random", "entropy", "--bins", "20"]
    analyze.main([str(bank[1]), *arguments, "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "Shares of the kept tokens (%)" in printed
    shares = json.loads((tmp_path / "categories.json").read_text())["methods"]
    assert list(shares) == ["crop", "random", "entropy", "all tokens"]
    ranks = json.loads((tmp_path / "entropy_ranks.json").read_text())
    assert ranks["tail"] == 0.016 and list(ranks["methods"]) == ["crop", "random", "entropy"]
    # By rank nothing can beat the entropy method at avoiding the lowest entropies.
    assert ranks["methods"]["entropy"]["tail_share"] <= ranks["methods"]["random"]["tail_share"]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"categories.png", "entropy_ranks.png", "heatmap_1_crop.png"} <= names


def test_a_run_from_the_command_line(tmp_path, monkeypatch, capsys):
    """Train on the embedded task with the export on, then analyse the run's folder and its result."""
    monkeypatch.chdir(ROOT)
    run = str(tmp_path / "run")
    train.main(
        ["--config", "examples/configs/tiny_math.yaml", "--use_cpu", "true", "--disable_tqdm", "true"]
        + ["--eval_dataset_name", "", "--reward", "none", "--reward_weights", "1.0", "--heatmap", "false"]
        + ["--prompts_per_step", "4", "--per_device_train_batch_size", "8", "--max_steps", "2"]
        + ["--max_completion_length", "64", "--selection_export_steps", "1", "--output_dir", run]
    )
    capsys.readouterr()
    analyze.main([run])
    printed = capsys.readouterr().out
    assert "No entropy ranks: these runs did not measure the student's entropy" in printed
    shares = json.loads((tmp_path / "run/analysis/categories.json").read_text())["methods"]
    assert list(shares) == ["crop", "all tokens"] and shares["crop"]["responses"] == 32
    assert shares["crop"]["shares"]["task-specific"] > shares["all tokens"]["shares"]["task-specific"]
    assert (tmp_path / "run/analysis/heatmap_1_crop.png").exists()


def test_results_from_the_command_line(tmp_path, capsys):
    for method, accuracy in (("crop", 0.5), ("tip", 0.4), ("opd", 0.45)):
        RunResult(method, None, accuracy, retention_ratio=0.2).write(tmp_path / method)
    analyze.main(["--results", str(tmp_path), "--output", str(tmp_path / "out")])
    table = (tmp_path / "out/budget_tables.md").read_text()
    assert table in capsys.readouterr().out and "| crop over tip | " in table and " +10.00 | " in table
    assert json.loads((tmp_path / "out/budget_curves.json").read_text())["gains"][0]["best"] == "tip"


MISTAKES = {
    "nothing": ([], "Give a rollout bank or a run's folder"),
    "no such source": (["./none"], "'none' does not exist; give a run's output_dir or a rollout bank"),
    "no export": (["{folder}"], "holds no exported selection; train with `--selection_export_steps 1`"),
    "no bank": (["{folder}/x.safetensors"], "cannot be read as a rollout bank"),
    "unknown method": (["{bank}", "--methods", "crpo"], "Unknown method 'crpo'"),
    "ratio": (["{bank}", "--retention_ratio", "2"], "`retention_ratio` must lie in (0, 1], got 2.0"),
    "tokenizer": (["{bank}", "--methods", "crop", "--tokenizer", "./none"], "No tokenizer can be loaded from './none'"),
    "results": (["--results", "./none"], "'none' does not exist; give a folder of results"),
}


@pytest.mark.parametrize("arguments", [["--bins", "0"], []], ids=["bins", "no matplotlib"])
def test_what_cannot_be_drawn_leaves_no_half_of_an_analysis(bank, tmp_path, monkeypatch, arguments):
    if not arguments:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="error: (`bins` must|Drawing a chart needs matplotlib: `pip)"):
        analyze.main([str(bank[1]), "--output", str(tmp_path / "out"), *arguments])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_sentence(bank, tmp_path, mistake):
    arguments, sentence = MISTAKES[mistake]
    (tmp_path / "x.safetensors").write_bytes(b"no bank")
    (tmp_path / "x.yaml").write_text("some: text: of\nseveral: lines\n")
    arguments = [a.format(folder=tmp_path, bank=bank[1]) for a in arguments]
    with pytest.raises(SystemExit) as stopped:
        analyze.main([*arguments, "--output", str(tmp_path / "out")])
    message = str(stopped.value)
    assert message.startswith("error: ") and sentence in message, message
    assert len(message.splitlines()) == 1
