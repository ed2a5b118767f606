"""Precision, recall and average precision of selectors, against references that are slow and obvious."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crop_trl.analysis.bank import RolloutBank
from crop_trl.analysis.dependence import AFTER_ERROR, NEGATIVE, POSITIVE, UNALIGNED
from crop_trl.analysis.selector_bench import CEILING, LabelledResponses, average_precision, bench
from crop_trl.commands import selectors
from crop_trl.methods import METHODS, SelectionSettings, Signals, TopKLogprobs
from crop_trl.methods.divergence import topk_jsd

ROOT = Path(__file__).parents[2]


def slow_average_precision(scores, positive) -> float:
    """The area under the steps of precision over recall, one threshold after another."""
    area, recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        above = [p for s, p in zip(scores, positive) if s >= threshold]
        area += (sum(above) / sum(positive) - recall) * sum(above) / len(above)
        recall = sum(above) / sum(positive)
    return area


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 0.7, 2.0]), st.booleans()), min_size=1, max_size=30))
def test_average_precision_is_that_of_the_thresholds(tokens):
    scores, positive = zip(*tokens)
    if any(positive):
        found = average_precision(np.array(scores), np.array(positive))
        assert found == pytest.approx(slow_average_precision(scores, positive))
    assert average_precision(np.array([3.0, 2.0, 1.0]), np.array([True, False, True])) == pytest.approx(5 / 6)


def test_measures_of_a_bank_by_hand():
    """Six responses to three problems, two counterfactuals, labels drawn at random; counted token by token."""
    generator = torch.Generator().manual_seed(0)
    size, lengths = (6, 9), [9, 7, 9, 1, 8, 9]

    def scored():
        logits = torch.randn(*size, 12, generator=generator) * 2
        top = logits.log_softmax(-1).topk(4)
        return TopKLogprobs(top.indices, top.values, top.values[..., 1])

    signals = {name: [scored()] for name in ("teacher/original", "teacher/paraphrase", "student/original")}
    signals["teacher/counterfactual"] = [scored(), scored()]
    tokens = torch.arange(9) < torch.tensor(lengths)[:, None]
    bank = RolloutBank(torch.zeros(size, dtype=torch.long), tokens, Signals(signals), [])
    labels = torch.tensor([POSITIVE, NEGATIVE, NEGATIVE, UNALIGNED])[torch.randint(4, size, generator=generator)]
    labels[2, 4:], labels[4, 6:], labels[3] = AFTER_ERROR, AFTER_ERROR, NEGATIVE
    labelled = LabelledResponses(
        labels.to(torch.int8), tokens, np.array([1, 1, 0, 1, 0, 0], dtype=bool), list("aabbcc"), [[]] * 6
    )
    rows = bench(bank, labelled, [1, 2], [0.2, 0.5], SelectionSettings())
    found = {(r["method"], r["counterfactuals"], r["budget"], r["responses"]): r for r in rows}
    original, paraphrase = signals["teacher/original"][0], signals["teacher/paraphrase"][0]
    divergence = [topk_jsd(original, c) for c in signals["teacher/counterfactual"]]
    surface = topk_jsd(original, paraphrase)
    scores = {
        ("crop", 1): divergence[0] - surface,
        ("crop", 2): (divergence[0] + divergence[1]) / 2 - surface,
        ("crop-max", 2): torch.maximum(*divergence) - surface,
        ("pc-opd", None): -surface,
        ("opd", None): None,
        (CEILING, None): (labels == POSITIVE).float(),
    }
    for (method, count), score in scores.items():
        for budget in (0.2, 0.5):
            for group, members in {"all": range(6), "right": (0, 1, 3), "wrong": (2, 4, 5)}.items():
                kept = hits = positives = 0
                precisions = []
                for b in members:
                    places = [t for t in range(lengths[b]) if labels[b, t] >= 0]
                    good = {t for t in places if labels[b, t] == POSITIVE}
                    values = [0.0 if score is None else score[b, t].item() for t in places]
                    ranked = [t for _, t in sorted(zip([-v for v in values], places))]
                    chosen = places if score is None else ranked[: max(1, int(budget * len(places)))]
                    kept, hits, positives = kept + len(chosen), hits + len(good & set(chosen)), positives + len(good)
                    if good:
                        precisions.append(slow_average_precision(values, [t in good for t in places]))
                row = found[method, count, budget, group]
                assert row["precision"] == pytest.approx(hits / kept)
                assert row["recall"] == pytest.approx(hits / positives)
                assert row["average_precision"] == pytest.approx(np.mean(precisions))
                assert row["precision_low"] <= row["precision"] <= row["precision_high"]
    assert {r["method"] for r in rows} == {*bank.choosing_methods(), CEILING}
    # What reads no counterfactual has one row a budget and group, the others one for each number of them.
    assert [r["counterfactuals"] for r in rows if r["method"] == "crop-ent"] == [1] * 6 + [2] * 6
    assert len([r for r in rows if r["method"] == "entropy"]) == 6


@pytest.fixture
def table():
    methods = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(methods)


def test_the_command_on_the_embedded_task(tmp_path, monkeypatch, capsys, table):
    """Samples once, with a method from a file; a second time no model is read; what is wrong is said."""
    monkeypatch.chdir(ROOT)
    data = tmp_path / "changes.jsonl"
    world = [sys.executable, "examples/tiny_math/problems.py", "--split", "heldout", "--n", "20", "--changes"]
    subprocess.run([*world, "--output", str(data)], check=True)
    common = ["--config", "examples/configs/tiny_math.yaml", "--use_cpu", "true", "--dataset_name", str(data)]
    common += ["--output_dir", str(tmp_path / "run"), "--bench_dir", str(tmp_path / "bench")]
    own = ["--selector", "examples/custom_selector.py:surprise"]
    selectors.main([*common, *own, "--bank_prompts", "8", "--responses", "4", "--show_labels", "30"])
    said = capsys.readouterr().out
    bank = RolloutBank.load(tmp_path / "bench/bank.safetensors")
    student = ROOT / "examples/tiny_math/models/student"
    assert bank.settings["model_name_or_path"] == str(student) and bank.settings["dataset_name"] == str(data)
    assert "Teacher: examples/tiny_math/models/teacher." in said
    assert "All responses, budget 20 %" in said and "| custom_selector.py:surprise " in said
    found = json.loads((tmp_path / "bench/selectors.json").read_text())
    rows = {
        (r["method"], r["counterfactuals"]): r for r in found["rows"] if r["budget"] == 0.2 and r["responses"] == "all"
    }
    # What chooses, `opd` for all that keep every token; one reads what these records have not.
    choosing = {name for name, method in METHODS.items() if method.chooses} - {"rlcsd"}
    assert {name for name, _ in rows} == {*choosing, "opd", CEILING}
    assert {count for name, count in rows if name == "crop"} == {1, 2, 4}
    # With four of its four or so conditions changed the teacher marks nearly all that depends on them.
    assert rows["crop", 4]["average_precision"] > rows["crop", 1]["average_precision"] > rows["random", None]["recall"]
    assert rows[CEILING, None]["average_precision"] == 1 and rows["opd", None]["recall"] == 1
    counts = found["labels"]["all"]
    assert counts["responses"] == 32 and counts["positive"] / (counts["positive"] + counts["negative"]) > 0.15
    assert found["labels"]["wrong"]["responses_with_a_wrong_value"] == found["labels"]["wrong"]["responses"]
    labels = pyarrow.parquet.read_table(tmp_path / "bench/labels.parquet").to_pylist()
    assert len(labels) == 32 and all(len(row["pieces"]) == len(row["labels"]) for row in labels)
    assert (tmp_path / "bench/selectors.png").stat().st_size > 10_000
    shown = (tmp_path / "bench/labels.txt").read_text()
    assert shown.count("⟦") == 30 and shown.count(" depends on a condition ") == 15

    monkeypatch.setattr("crop_trl.commands.replay.make_trainer", None)
    selectors.main([*common, *own])
    again = json.loads((tmp_path / "bench/selectors.json").read_text())
    assert again["rows"] == found["rows"] and again["labels"] == found["labels"]

    short = tmp_path / "short.jsonl"
    short.write_text("".join(data.read_text().splitlines(keepends=True)[:2]))
    plain = "examples/tiny_math/data/heldout.jsonl"
    for change, sentence in (
        (["--dataset_name", str(short)], "which is no problem of the dataset"),
        (["--dataset_name", plain], "has no `solution` or no `changes`"),
        (["--counterfactuals", "0"], "`counterfactuals` must be numbers of at least 1, got [0]"),
        (["--budgets", "1.5"], "`retention_ratio` must lie in (0, 1], got 1.5"),
        (["--teacher_source", "student"], "`teacher_source` is 'student', but "),
        (
            ["--selector", "examples/hinted.py:hinted"],
            "lacks teacher/told (column `told_prompt`) that 'hinted.py:hinted'",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            selectors.main([*common, *change])
        assert sentence in str(ended.value)
