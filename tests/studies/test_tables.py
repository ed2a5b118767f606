"""The tables that are made of a study's rows, against numbers worked out by hand or by a library."""

import json
import shlex

import pytest
from paper import ABLATION, BENCHMARKS, BUDGETS, PRINTED, results
from scipy import stats
from studies.made_rows import CROP, DEFAULTS, OPD, RANDOM, cells, row, rows, table

from crop_trl.commands import study
from crop_trl.studies.rows import write_rows
from crop_trl.studies.tables import groups_of, study_markdown


def test_means_and_differences_by_seed():
    groups = groups_of(rows(), DEFAULTS)
    assert [group.method for group in groups] == ["crop", "opd", "random"] and groups[0].settings == {}
    text = study_markdown(rows(), DEFAULTS, "random")
    found = {name: cells(text, name, "differences to random") for name in ("crop", "opd")}
    assert len(table(text, "differences to random")) == 3
    test = stats.ttest_rel([CROP[seed] for seed in range(3)], list(RANDOM.values()))
    low, high = test.confidence_interval(0.95)
    assert found["crop"][:3] == ["3", f"+10.0 ({100 * low:+.1f} to {100 * high:+.1f})", f"{test.pvalue:.3g}"]
    # The smaller of two p is doubled, the larger stays, unless that would change their order.
    other = stats.ttest_rel(list(OPD.values()), list(RANDOM.values())).pvalue
    small, large = sorted([test.pvalue, other])
    assert {line[3] for line in found.values()} == {f"{2 * small:.3g}", f"{max(large, 2 * small):.3g}"}
    low, high = map(float, found["crop"][4].split(" to "))
    assert low < 10 < high
    low, high = stats.t.interval(0.95, 3, 0.75, stats.sem(list(CROP.values())))
    assert cells(text, "crop")[:3] == ["4", "40.0", f"75.0 ({100 * low:.1f} to {100 * high:.1f})"]
    assert "corrected by Holm's method (number of tests: 2)" in text
    alone = study_markdown([row("crop", 0, 0.5), row("base", 0, None)], DEFAULTS, "random")
    # A gap that was logged once is none from one end of training to the other.
    gaps = [row("crop", 0, 0.5) | {"gap_kept_first": 0.85, "gap_kept_last": last} for last in (0.85, 0.42)]
    assert [cells(study_markdown([each], DEFAULTS), "crop")[6] for each in gaps] == ["0.85", "0.85 to 0.42"]
    assert cells(alone, "crop")[:3] == ["1", "40.0", "50.0"] and cells(alone, "base")[2] == "-"
    assert "No run of `random` was measured; measured were crop, base." in alone


def test_numbers_stay_among_what_they_can_be():
    """Nothing right is the worst, not what comes first; intervals end at 0 and 100; tests are those that were made."""
    found = [row("tip", 0, 0.0), row("tip", 1, 0.0), row("crop", 0, 0.1), row("crop", 1, 0.9), row("random", 0, 0.3)]
    found += [row("random", 1, 0.3), row("opd", 0, 0.2), row("entropy", 0, None)]
    assert [group.method for group in groups_of(found, DEFAULTS)] == ["crop", "random", "opd", "tip", "entropy"]
    text = study_markdown(found, DEFAULTS, "random")
    assert cells(text, "crop")[2] == "50.0 (0.0 to 100.0)" and cells(text, "tip")[2] == "0.0 (0.0 to 0.0)"
    # Of three differences one has a single seed, and one is the same for both.
    assert len(table(text, "differences to random")) == 4 and "Holm's method (number of tests: 1)" in text
    assert cells(text, "crop", "differences to random")[1] == "+20.0 (-100.0 to +100.0)"
    assert "Not compared: entropy (not measured)." in text


def test_equal_differences_are_no_test_and_pairs_are_of_the_same_problems_and_of_measured_runs():
    thirds = {"random": (1, 2), "crop": (3, 4), "opd": (5, 2)}
    found = [row(method, seed, n / 12) for method, each in thirds.items() for seed, n in enumerate(each)]
    found += [row("tip", seed, 0.5, eval_dataset_name="other.jsonl") for seed in (0, 1)]
    found = [r | {"settings": json.dumps({"eval_dataset_name": "x.jsonl"} | json.loads(r["settings"]))} for r in found]
    text = study_markdown([*found, row("crop", 2, None, eval_dataset_name="x.jsonl")], DEFAULTS, "random")
    assert cells(text, "crop")[1] == "2 of 3" and cells(text, "opd")[1] == "2"
    differences = {name: cells(text, name, "differences to random")[1:] for name in ("crop", "opd", "tip")}
    assert differences["crop"][1:4] == ["+16.7 (+16.7 to +16.7)", "-", "-"]
    # Of two tests, the equal differences of a third method are none.
    assert "number of tests: 2" in text and differences["opd"][2] != "-" and differences["opd"][4] != "-"
    assert differences["tip"][4] == "-" and differences["crop"][4] != "-"


def test_the_untrained_student_stands_beside_every_seed():
    found = [*rows(), row("base", 0, None) | {"problems_after": None}]
    text = study_markdown(found, DEFAULTS, "base")
    low, high = stats.ttest_1samp([a - 0.4 for a in CROP.values()], 0).confidence_interval(0.95)
    assert cells(text, "crop", "differences to base")[:2] == ["4", f"+35.0 ({100 * low:+.1f} to {100 * high:+.1f})"]
    shares = {"x": {"mean": 0.25, "pass": 1.0, "samples": 2, "problems": 2, "shares": {"1": 0.0, "2": 0.5}}}
    better = {"x": shares["x"] | {"mean": 0.5, "shares": {"1": 0.5, "2": 0.5}}}
    found = [row("base", 7, None, evaluation=shares), *(row("crop", seed, None, evaluation=better) for seed in (0, 1))]
    found = cells(study_markdown(found, DEFAULTS, "base"), "crop", "differences to base")
    assert found[:2] == ["2", "+25.0 (+25.0 to +25.0)"] and found[4] != "-"


def measured_on(mean: float, **drawn):
    """What a row says of two problems of a benchmark `x`."""
    part = {"mean": mean, "pass": 1.0, "samples": 2, "problems": 2, "shares": {"1": mean, "2": mean}}
    return {"x": part | ({"drawn": drawn} if drawn else {})}


@pytest.mark.parametrize("of", ["model_name_or_path", "model_revision", "eval_dataset_name", "temperature"])
def test_an_untrained_student_stands_beside_its_own_runs_alone(of):
    """In whatever order rows come; what means nothing before training, such as the rate, makes no second one."""
    found = []
    for value, before in (("weak", 0.1), ("strong", 0.8)):
        found += [row("base", 0, None, learning_rate=rate, **{of: value}) for rate in (1e-5, 1e-6)]
        found += [row("opd", seed, before + 0.05, learning_rate=1e-5, **{of: value}) for seed in (0, 1)]
        found[-4:] = [each | {"accuracy_before": before} for each in found[-4:]]
    found.append(row("crop", 0, 0.9, learning_rate=1e-6, **{of: "third"}))
    for each in (found, found[::-1]):
        text = study_markdown(each, DEFAULTS, "base")
        header, *lines = table(text)
        at = {name: place for place, name in enumerate(header)}
        assert {(line[at[of]], line[at["Before (%)"]]) for line in lines if line[0] == "base"} == {
            ("weak", "10.0"),
            ("strong", "80.0"),
        }
        assert [line[at["learning_rate"]] for line in lines if line[0] == "base"] == ["-", "-"]
        header, *lines = table(text, "differences to base")
        points = header.index("Difference (points)")
        assert [line[points] for line in lines] == ["+5.0 (+5.0 to +5.0)"] * 2
        left = text.partition("Not compared: ")[2]
        assert f"{of} third" in left and "(no `base` of its student and data)." in left
    # Rows that were measured on a benchmark alone, where held-out problems and sampling of training do not count.
    found = [each | {"accuracy_before": None, "accuracy_after": None} for each in found]
    values = {"weak": (0.0, 0.5), "strong": (0.5, 1.0), "third": (0.5, 1.0)}
    for each in found:
        mean = values[json.loads(each["settings"])[of]][each["method"] != "base"]
        each["evaluation"] = json.dumps(
            measured_on(mean if of.startswith("model") else 0.5 * (each["method"] != "base"))
        )
    lines = table(study_markdown(found, DEFAULTS, "base"), "differences to base")[1:]
    compared = {("opd", "weak"), ("opd", "strong")} | ({("crop", "third")} if not of.startswith("model") else set())
    at = header.index(of)
    assert {(line[0], line[at]) for line in lines} == compared and {line[points][:5] for line in lines} == {"+50.0"}


def test_each_student_of_a_world_is_measured_untrained_as_it_is_trained(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    (tmp_path / "out").mkdir()

    def left(*runs):
        write_rows(tmp_path / "out/runs.parquet", {each["run"]: each for each in runs})
        given = ["--table", "--output", str(tmp_path / "out"), "--benchmarks", f"x={tmp_path}/x.jsonl", "--dry_run"]
        assert study.main(given) == 0
        found = (each.partition("\n") for each in capsys.readouterr().out.split("# ") if each.startswith("w/"))
        return {key: shlex.split(command) for key, _, command in found}

    def student(words):
        return [words[words.index(name) + 1] for name in ("--model", "--model_revision") if name in words]

    runs = [row("opd", seed, 0.5, model_name_or_path="a/one", learning_rate=10.0**-seed) for seed in (5, 6)]
    assert {key: student(words) for key, words in left(*runs).items()} == {"w/method=base": ["a/one"]}
    runs += [row("opd", 0, 0.5, model_name_or_path="a/one", model_revision="v1")]
    pinned = {"w/method=base,model_revision=main": ["a/one"], "w/method=base,model_revision=v1": ["a/one", "v1"]}
    for each in (runs, runs[::-1]):
        assert {key: student(words) for key, words in left(*each).items()} == pinned
    # One was measured before the other came, with the settings of some run.
    base = row("base", 7, None, evaluation=measured_on(0.5), model_name_or_path="a/one", learning_rate=1.0)
    base["run"] = "w/method=base"
    assert list(left(*runs, base)) == ["w/method=base", "w/method=base,model_revision=v1"]


def test_two_files_with_a_method_of_one_name_are_two_methods():
    hashes = dict.fromkeys("ab", "0" * 64)
    found = [
        row("mine.py:f", seed, 0.3, selector=f"{f}/mine.py:f", selector_sha256=hashes[f])
        for f in "ab"
        for seed in (0, 1)
    ]
    found += [row("mine.py:f", seed, 0.5, selector="a/mine.py:f", selector_sha256="1" * 64) for seed in (2, 3)]
    header, *lines = table(study_markdown([*found, row("opd", 0, 0.2)], DEFAULTS))
    assert header[:3] == ["Method", "selector", "selector_sha256"] and "Seeds" in header
    assert sorted(line[1:4] for line in lines) == [
        ["-", "-", "1"],
        ["a/mine.py:f", "0" * 8, "2"],
        ["a/mine.py:f", "1" * 8, "2"],
        ["b/mine.py:f", "0" * 8, "2"],
    ]
    # Of data, too, a hash is shown where a name has two, and what is not known is like what is.
    one, two, three = (
        {"eval_dataset_name": "x.jsonl", "eval_dataset_sha256": sha} for sha in ("1" * 64, "2" * 64, None)
    )
    other = {"eval_dataset_name": "y.jsonl", "eval_dataset_sha256": "3" * 64}
    text = study_markdown([row("opd", seed, 0.2, **each) for seed, each in enumerate((one, three, other))], DEFAULTS)
    assert [line[1:3] for line in table(text)] == [["eval_dataset_name", "Seeds"], ["x.jsonl", "2"], ["y.jsonl", "1"]]
    text = study_markdown([row("opd", seed, 0.2, **each) for seed, each in enumerate((one, two))], DEFAULTS)
    assert [line[1] for line in table(text)] == ["eval_dataset_sha256", "1" * 8, "2" * 8]
    # Otherwise the name says it.
    header = table(study_markdown([found[0], row("opd", 0, 0.2)], DEFAULTS))[0]
    assert header[:2] == ["Method", "Seeds"]


def test_each_is_compared_with_the_runs_whose_settings_agree_best():
    def pairs(*found):
        text = study_markdown(found, DEFAULTS, "random")
        header, *lines = table(text, "differences to random") or [[]]
        points = header.index("Difference (points)") if header else 0
        return {", ".join(line[: points - 1]): line[points] for line in lines}, text.partition("Not compared: ")[2]

    ratios = [row(m, 0, a, retention_ratio=r) for m, a, r in (("crop", 0.5, 0.1), ("crop", 0.6, 0.2))]
    rivals = [row("random", 0, 0.4, retention_ratio=0.1), row("random", 0, 0.3, retention_ratio=0.2)]
    # Of two budgets neither is that of a method that keeps every token.
    found, left = pairs(*ratios, *rivals, row("opd", 0, 0.9))
    assert found == {"crop, 0.1": "+10.0", "crop, 0.2": "+30.0"}
    assert left.startswith("opd (2 groups of `random` fit).")
    assert pairs(row("opd", 0, 0.9), *ratios, rivals[0])[0]["opd, -"] == "+50.0"
    # Each method at a rate of its own.
    rates = [row("crop", 0, 0.5, learning_rate=1e-5), row("random", 0, 0.4, learning_rate=1e-6)]
    assert pairs(*rates)[0] == {"crop, 1e-05": "+10.0"}
    # What a method does not read differs, the rate agrees.
    rates = [row("random", 0, after, learning_rate=rate) for after, rate in ((0.4, 1e-5), (0.3, 1e-6))]
    several = row("crop", 0, 0.5, learning_rate=1e-6, num_counterfactuals=4)
    assert pairs(several, *rates)[0] == {"crop, 1e-06, 4": "+20.0"}
    assert pairs(row("crop", 0, 0.5, learning_rate=3e-6), *rates)[0] == {}
    # Never at another budget, never with another seed.
    found, left = pairs(row("crop", 0, 0.5, retention_ratio=0.1), row("random", 0, 0.4), row("tip", 1, 0.5))
    assert found == {}
    assert left.startswith(
        "crop, retention_ratio 0.1 (no `random` at its budget); tip, retention_ratio 0.2 (no seed in common)."
    )


def test_what_keeps_every_token_has_one_run_a_seed_in_every_table():
    found = [row("crop", seed, 0.5, retention_ratio=ratio) for seed in (0, 1) for ratio in (0.1, 0.2)]
    found += [row("opd", s, a, retention_ratio=r) for s, a, r in ((0, 0.6, 0.1), (0, 0.9, 0.2), (1, 0.8, 0.1))]
    text = study_markdown(found, DEFAULTS, "opd")
    # Student's t with one degree of freedom: 12.706 times 0.1.
    assert cells(text, "opd")[:4] == ["-", "2", "40.0", "70.0 (0.0 to 100.0)"]
    assert cells(text, "opd", "Accuracy over the budget")[-1] == "70.00 (0.0 to 100.0)"
    assert cells(text, "crop over opd", "Accuracy over the budget")[0] == "-20.00 (-100.0 to +100.0)"
    assert {line[3] for line in table(text, "differences to opd")[1:]} == {"-20.0 (-100.0 to +100.0)"}


NAMES = ("base", "opd", "iw-opd", "credit", "entropy", "tip", "ta-opd", "crop")


def evaluated(method: str, means: list[float], world: str = "setting_a", ratio: float = 0.2, passes=(0.5,) * 4):
    """A row as the paper's settings make it: no held-out problems, and a clean subset, here without a right answer."""
    found = {
        name: {"mean": mean, "pass": passed, "samples": samples, "problems": problems, "shares": {"1": mean, "2": mean}}
        for (name, (problems, samples)), mean, passed in zip(BENCHMARKS.items(), means, passes)
    }
    found["MATH-500-Clean"] = {**found["MATH-500"], "mean": 0.0, "problems": 492}
    return row(method, 42, None, world, found, retention_ratio=ratio)


def test_the_papers_tables_come_out_of_the_runs_of_its_grids():
    found = []
    for world, block in (("setting_b", PRINTED["B"]), ("setting_a", PRINTED["A"])):
        for name, line in reversed(list(zip(NAMES, block.values()))):
            shares = results("", "", line)["benchmarks"].values()
            means, passes = ([each[kind] for each in shares] for kind in ("mean", "pass"))
            found.append(evaluated(name, means, world, passes=passes))
    for name, line in list(ABLATION.items())[:-1]:
        sizes = [problems * samples for problems, samples in BENCHMARKS.values()]
        found.append(evaluated(name, [round(float(m) * size / 100) / size for m, size in zip(line.split(), sizes)]))
    for name, averages in BUDGETS.items():
        # Those at 20 % are above, but for one.
        further = {ratio: float(avg) / 100 for ratio, avg in averages.items() if ratio != 20 or name == "crop-ent"}
        found += [evaluated(name, [avg] * 4, ratio=ratio / 100) for ratio, avg in further.items()]
    text = study_markdown(found, DEFAULTS, "crop", "whole")

    # Both settings in one table, the methods of the paper's in its order.
    main = [line for line in table(text, "## Benchmarks (%)") if "retention_ratio" not in line[1] or "0.2" in line[1]]
    ours = [[line[0], line[1].partition(",")[0], *line[2:11]] for line in main if line[1].partition(",")[0] in NAMES]
    printed = {"setting_a": PRINTED["A"], "setting_b": PRINTED["B"]}
    assert ours == [[w, n, *line.split()] for w, block in printed.items() for n, line in zip(NAMES, block.values())]
    assert "crop, retention_ratio 0.2 +1.41 over the strongest other method, ta-opd, retention_ratio 0.2; +1.41" in text

    ablation = table(text, "### setting_a: selectors beside crop, retention_ratio 0.2 (%)")
    assert ablation[0] == ["Method", *BENCHMARKS, "Avg.", "Minus crop"] and text.count("selectors beside") == 1
    assert ablation[1:] == [[name, *line.split()] for name, line in ABLATION.items()]

    budgets = "### setting_a: Accuracy over the budget (%)"
    assert table(text, budgets)[0] == ["Method", *(f"{r} %" for r in (5, 10, 15, 20, 30, 40, 50)), "all tokens"]
    assert cells(text, "crop", budgets)[:-1] == list(BUDGETS["crop"].values())
    pair = cells(text, "crop over crop-student", "### setting_a: crop and crop-student over the budget (%)")
    assert pair[:4] == ["+0.36", "+0.16", "+0.89", "+0.57"]
    pair = cells(text, "crop over crop-ent", "### setting_a: crop and crop-ent over the budget (%)")
    assert pair == ["-", "+2.35", "-", "+2.89", "+0.84", "-0.38", "+0.65"]

    # Paired by Avg., since nothing else was measured.
    against = {tuple(line[:2]): line[2:] for line in table(text, "### setting_a: differences to crop")}
    assert against["ta-opd", "0.2"][:4] == ["1", "-1.4", "-", "-"] and against["crop-ent", "0.4"][1] == "+0.4"
    low, high = map(float, against["ta-opd", "0.2"][4].split(" to "))
    assert low < -1.4 < high
    assert "Accuracy is Avg. of AIME24, AIME25, AMC23, MATH-500." in text
    # Avg. as the paper's text has it, in all tables.
    clean = study_markdown(found, DEFAULTS, average="clean")
    assert (
        cells(clean, "crop", budgets)[3] == cells(clean, "crop", "### setting_a: selectors beside crop")[4] == "11.77"
    )
    assert "| setting_a | crop, retention_ratio 0.2 | 11.77 |" in clean.replace("*", "")


def test_worlds_on_other_benchmarks_have_tables_of_their_own():
    one, two = ({name: {"mean": 0.5, "pass": 0.5, "samples": 1, "problems": 5}} for name in ("x", "y"))
    found = [row("crop", 0, 0.5, "a", one), row("crop", 0, 0.5, "b", two), row("opd", 0, 0.4, "b")]
    text = study_markdown([*found, row("crop", 0, 0.5, "c", one), row("opd", 0, 0.5, "c", two)], DEFAULTS, "opd")
    assert text.count("## Benchmarks") == 3 and not table(text, "## Benchmarks (%): c")  # which share nothing
    assert "## Benchmarks (%): c\n\nLeft out, as some runs lack them: y, x.\n" in text
    for world, name in (("a", "x"), ("b", "y")):
        header, *lines = table(text, f"## Benchmarks (%): {world}")
        assert header == ["Method", "Avg.", f"{name} Mean@1", f"{name} Pass@1"] and lines == [["crop", *["50.00"] * 3]]
    # Where not all were evaluated, held-out problems are what is compared.
    assert cells(text, "crop", "### b: differences to opd")[1] == "+10.0"
    # Of three runs one was not evaluated, and one not on all.
    found = [row("crop", seed, None, "d", each) for seed, each in enumerate((one, one | two, None))]
    text = study_markdown([*found, row("opd", 0, None, "d", one)], DEFAULTS)
    lines = table(text, "## Benchmarks (%): d")[1:]
    assert [line[:2] for line in lines] == [["opd", "50.00"], ["crop (2 of 3)", "50.00 (50.0 to 50.0)"]]
    assert "Left out, as some runs lack them: y." in text


def test_no_table_has_a_benchmark_on_which_its_runs_were_evaluated_differently():
    """The other benchmark, and the tables of the other world, stay; in a study of prompts these differ."""
    drawn = {"max_tokens": 32, "sampler": "hf", "problems": "be40", "prompt_template": "{problem}", "temperature": 0.7}

    def evaluated(part=None, **other):
        found = {**measured_on(0.5, **drawn), "y": {**measured_on(1.0, **drawn)["x"]}}
        return found | {"x": found["x"] | {"drawn": drawn | other} | (part or {})}

    def text(part=None, asked=None, **other):
        found = [row("opd", 0, None, evaluation=evaluated()), row("crop", 0, None, evaluation=evaluated(part, **other))]
        found[1]["settings"] = json.dumps(json.loads(found[1]["settings"]) | (asked or {}))
        return study_markdown([*found, row("crop", 0, None, "v", evaluated(part, **other))], DEFAULTS, "opd")

    assert "Left out" not in text() and text().count("## Benchmarks (%)") == 1 and "not known" not in text()
    for setting, value, one, other in (
        ("max_tokens", 16, "32", "16"),
        ("temperature", 0, "0.7", "0"),
        ("sampler", "vllm", '"hf"', '"vllm"'),
        ("problems", "2976", '"be40"', '"2976"'),
        ("prompt_template", "Now: {problem}", '"{problem}"', '"Now: {problem}"'),
    ):
        said = text(**{setting: value})
        line = f'Left out: x. w/{{"method": "opd", "seed": 0}} was evaluated with `{setting}` {one}, '
        assert f'{line}w/{{"method": "crop", "seed": 0}} with {other}; evaluate them alike.' in said
        assert [line[:2] for line in table(said, "## Benchmarks (%): w")[1:]] == [["opd", "100.00"], ["crop", "100.00"]]
        assert cells(said, "crop", "## Benchmarks (%): v") == ["75.00", "50.00", "100.00", "100.00", "100.00"]
        assert said.count("Accuracy is Avg. of y.") == said.count("Accuracy is Avg. of x, y.") == 1
    assert "`samples` 2, w" in text({"samples": 4}) and "`number of problems` 2, w" in text({"problems": 40})
    assert "Left out" not in text(asked={"prompt_template": "Now: {problem}"}, prompt_template="Now: {problem}")
    # The paper's two settings differ in how a student is asked, and are one table; others are two.
    for other, tables in (({"prompt_template": "Now: {problem}"}, 1), ({"max_tokens": 16}, 2)):
        worlds = [row("opd", 0, None, "v", evaluated()), row("opd", 0, None, "w", evaluated(**other))]
        assert study_markdown(worlds, DEFAULTS).count("## Benchmarks (%)") == tables
    # A row of before this was written down.
    assert text({"drawn": None}).count("How 2 runs were evaluated is not known; they are taken to be like the") == 1
