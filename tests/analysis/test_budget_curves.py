"""Budget curves: means, intervals and gains by hand, and every kind of result file."""

import json

import pytest

from crop_trl.analysis.budget_curves import StudentAccuracy, budget_curves, read_runs, save_budget_chart

# The paper's table on the budget in setting A, as far as it is in the text: CROP, and its gains over the best other
# selector.
PAPER = {0.05: (0.2626, 0.0159), 0.10: (0.2593, 0.0063), 0.15: (0.2594, 0.0048), 0.20: (0.2678, 0.0141)}


def test_means_intervals_and_gains_by_hand():
    runs = [StudentAccuracy("crop", 0.2, a, s) for s, a in enumerate((0.5, 0.6, 0.7))]
    runs += [StudentAccuracy("tip", 0.2, a, s) for s, a in enumerate((0.4, 0.6, 0.5))]
    runs += [
        StudentAccuracy("entropy", 0.2, 0.3, 0),
        StudentAccuracy("random", 0.2, 0.9, 0),
        StudentAccuracy("crop", 0.1, 0.4, 0),
    ]
    runs += [StudentAccuracy("opd", None, 0.55, 7), StudentAccuracy("base", None, 0.2)]
    curves = budget_curves(runs)
    assert list(curves.curves) == ["crop", "entropy", "random", "tip"]
    assert list(curves.curves["crop"]) == [0.1, 0.2]
    point = curves.curves["crop"][0.2]
    # Standard deviation 0.1 over three: 4.303 * 0.1 / sqrt(3).
    assert point.accuracy == pytest.approx(0.6) and point.runs == 3
    assert point.interval == pytest.approx((0.6 - 0.24844, 0.6 + 0.24844), abs=1e-4)
    assert curves.curves["crop"][0.1].interval is None
    assert curves.dense["base"].accuracy == 0.2
    small, large = curves.gains
    assert (small.best, small.over_best) == (None, None)
    # Random is no rival; against TIP seed by seed 0.1, 0, 0.2.
    assert large.best == "tip"
    assert large.over_best.accuracy == pytest.approx(0.1)
    assert large.over_best.interval == pytest.approx((0.1 - 0.24844, 0.1 + 0.24844), abs=1e-4)
    # No seed in common: the difference of the means, and no interval.
    assert large.over_opd.accuracy == pytest.approx(0.05) and large.over_opd.interval is None


def test_an_interval_of_two_runs_stays_among_what_an_accuracy_can_be():
    runs = [StudentAccuracy(m, r, a, s) for m, r, two in (("crop", 0.2, (0.9, 1.0)), ("opd", None, (0.0, 1.0)))
            for s, a in enumerate(two)]  # fmt: skip
    curves = budget_curves(runs)
    low, high = curves.curves["crop"][0.2].interval
    assert 0 < low < 0.5 and high == 1 and curves.dense["opd"].interval == (0, 1)
    assert curves.gains[0].over_opd.interval == (-1, 1)


def test_the_papers_gains(tmp_path):
    runs = [StudentAccuracy("opd", None, 0.2382)]
    for ratio, (accuracy, gain) in PAPER.items():
        runs += [StudentAccuracy("crop", ratio, accuracy), StudentAccuracy("tip", ratio, accuracy - gain)]
        runs.append(StudentAccuracy("entropy", ratio, 0.2))
    curves = budget_curves(runs)
    assert [g.best for g in curves.gains] == ["tip"] * 4
    assert [round(100 * g.over_best.accuracy, 2) for g in curves.gains] == [1.59, 0.63, 0.48, 1.41]
    over_opd = [round(100 * g.over_opd.accuracy, 2) for g in curves.gains]
    assert min(over_opd) == 2.11 and max(over_opd) == 2.96
    save_budget_chart(curves, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 20_000


def write(path, **content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def trained(folder, method, ratio, seed, before, after):
    write(folder / "result.json", method=method, retention_ratio=ratio, seed=seed, accuracy_before=before,
          accuracy_after=after)  # fmt: skip


def test_results_of_training_and_evaluation(tmp_path):
    trained(tmp_path / "a/crop-seed0", "crop", 0.2, 0, 0.3, 0.5)
    trained(tmp_path / "a/opd-seed0", "opd", 0.2, 0, 0.3, 0.45)
    trained(tmp_path / "a/base", "base", 0.2, 0, 0.3, None)
    training = {"method": "tip", "retention_ratio": 0.1, "seed": 3}
    write(tmp_path / "b/results.json", benchmarks={}, average=0.4, training=training)
    write(tmp_path / "c/results.json", benchmarks={}, average=0.35, label="base")
    runs = read_runs([tmp_path / "a", tmp_path / "b/results.json", tmp_path / "c"])
    # The untrained student of one seed is one student, however many runs began with it.
    assert set(runs) == {
        StudentAccuracy("crop", 0.2, 0.5, 0),
        StudentAccuracy("base", None, 0.3, 0),
        StudentAccuracy("opd", None, 0.45, 0),
        StudentAccuracy("tip", 0.1, 0.4, 3),
        StudentAccuracy("base", None, 0.35),
    }
    assert len(runs) == 5
    # Of a study whose students were evaluated it is the evaluations that count.
    trained(tmp_path / "b", "tip", 0.1, 3, 0.3, 0.6)
    assert read_runs([tmp_path / "b"]) == [StudentAccuracy("tip", 0.1, 0.4, 3)]


def test_what_a_training_run_says_of_itself_reaches_an_evaluation(tmp_path):
    from crop_trl.evaluation.run import training_diagnostics

    trained(tmp_path, "tip", 0.1, 3, 0.2, 0.4)
    write(tmp_path / "trainer_state.json", global_step=5, log_history=[{"selection/retention_ratio": 0.09}])
    said = training_diagnostics(tmp_path)
    assert said == {"method": "tip", "retention_ratio": 0.1, "seed": 3, "step": 5, "budget": 0.09, "truncated": None}


def test_runs_of_equal_accuracy_without_a_seed_are_several(tmp_path):
    """Three runs, two of which came out alike, are three; the student before training is one, whoever reports it."""
    for number, after in enumerate((0.6, 0.6, 0.75)):
        trained(tmp_path / f"crop{number}", "crop", 0.2, None, 0.4, after)
    curves = budget_curves(read_runs([tmp_path]))
    assert curves.curves["crop"][0.2].runs == 3 and round(curves.curves["crop"][0.2].accuracy, 6) == 0.65
    assert curves.dense["base"].runs == 1


MISTAKES = {
    "does not exist": "'{}/none' does not exist; give a folder of results",
    "empty": "'{}/empty' holds no result.json or results.json",
    "twice": "have 0.3 and 0.5 for method 'opd' with seed 1; give one",
    "unknown": "does not say what was trained; evaluate it with `--training_run`",
    "broken": "is not whole JSON (cut off, perhaps); write it again with the program it came from",
}


def test_mistakes(tmp_path):
    (tmp_path / "empty").mkdir()
    for number, (after, seed) in enumerate(((0.3, 1), (0.4, 2), (0.5, 1))):
        trained(tmp_path / f"twice/{number}", "opd", None, seed, 0.1, after)
    write(tmp_path / "unknown/results.json", benchmarks={}, average=0.3, label="mine")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/result.json").write_text("{")
    found = {}
    for name, sentence in MISTAKES.items():
        with pytest.raises(ValueError) as caught:
            read_runs([tmp_path / ("none" if name == "does not exist" else name)])
        found[name] = str(caught.value) if sentence.format(tmp_path) not in str(caught.value) else sentence
    assert found == MISTAKES


def test_nothing_of_the_method_in_question():
    with pytest.raises(ValueError, match="`method` 'crop' has no result with a retention ratio; those that have: tip"):
        budget_curves([StudentAccuracy("tip", 0.2, 0.3)])
    with pytest.raises(ValueError, match="There is no result"):
        budget_curves([])
