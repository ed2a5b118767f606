"""The paper's tables, rebuilt from counts: every number that it prints has to come out."""

import pytest
from paper import BENCHMARKS, PRINTED, results

from crop_trl.evaluation.run import average_of, averaged
from crop_trl.evaluation.tables import bold_maxima, comparison, comparison_markdown, main_table, percent


def shown(table: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.replace("*", "").strip("|").split("|")]
        for line in table.splitlines()
        if "|" in line
    ]


def test_the_papers_main_table_comes_out_of_its_counts():
    runs = [results(setting, *row) for setting, rows in PRINTED.items() for row in rows.items()]
    table = main_table(runs)
    header, _, *rows = shown(table)
    assert header == ["Setting", "Method", "Avg."] + [
        f"{name} {kind}@{samples}" for name, (_, samples) in BENCHMARKS.items() for kind in ("Mean", "Pass")
    ]
    assert rows == [
        [setting, label, *numbers.split()] for setting, block in PRINTED.items() for label, numbers in block.items()
    ]
    # Marked are the paper's maxima, ties included, for each setting.
    assert "| A | CROP | **26.78** | **8.33** | **23.33** | 3.75 | 10.00 | **35.00** | **67.50** | **60.05** |" in table
    assert "| B | TIP | 50.31 | 24.17 | 40.00 | 21.67 | 40.00 | 70.63 | **92.50** | **84.80** | **92.60** |" in table
    assert "Setting A: CROP +1.41 over the strongest other method, TA-OPD; +1.41 over the strongest other hard" in table
    # The paper's 1.42 is the difference of two rounded numbers.
    assert "Setting B: CROP +0.97 over the strongest other method, IW-OPD; +1.43 over the strongest other" in table
    assert "AIME24 (30 problems), AIME25 (30 problems), AMC23 (40 problems), MATH-500 (500 problems);" in table


def test_the_papers_numbers_are_those_of_500_problems():
    """What docs/differences.md says: of 32 numbers on MATH-500, all can come out of 500 problems, one out of 492."""

    def possible(number: str, total: int) -> bool:
        near = round(float(number) * total / 100)
        return any(percent(count / total) == number for count in range(near - 1, near + 2))

    columns = [numbers.split()[7:] for block in PRINTED.values() for numbers in block.values()]
    for problems, expected in ((500, 32), (492, 1)):
        found = sum(possible(mean, 4 * problems) + possible(passed, problems) for mean, passed in columns)
        assert found == expected


def test_shares_round_like_the_papers():
    for right, answers, printed in ((98, 320, "30.63"), (106, 320, "33.13"), (226, 320, "70.63"), (7, 240, "2.92")):
        assert percent(right / answers) == printed
    assert percent(1 / 3, 1) == "33.3" and percent(None) == "-" and percent(0.0) == "0.00" and percent(1.0) == "100.00"
    assert bold_maxima([[0.5, None], [0.25, None], [0.5, 0.1]]) == [
        ["**50.00**", "-"],
        ["25.00", "-"],
        ["**50.00**", "**10.00**"],
    ]


def test_avg_counts_the_clean_subset_or_the_whole():
    clean = {"MATH-500-Clean": {"problems": 492, "samples": 4, "mean": 0.5, "pass": 0.75}}
    run = results("A", "CROP", PRINTED["A"]["CROP"], clean)
    names = list(run["benchmarks"])
    assert averaged(names) == ["AIME24", "AIME25", "AMC23", "MATH-500-Clean"]
    assert averaged(names, "whole") == list(BENCHMARKS)
    assert averaged(["MATH-500-Clean"], "whole") == ["MATH-500-Clean"]
    for choice in ("clean", "whole"):
        assert average_of({**run, "averaged": averaged(names, choice)}) == choice
    table = main_table([run])
    # (20 / 240 + 9 / 240 + 112 / 320 + 0.5) / 4
    assert shown(table)[2] == ["CROP", "24.27", *PRINTED["A"]["CROP"].split()[1:], "50.00", "75.00"]
    assert "MATH-500-Clean (492 problems); " in table and "`--average whole` counts MATH-500 instead." in table
    table = main_table([run], "whole")
    assert shown(table)[2][1] == "26.78"
    assert "MATH-500 (500 problems); " in table and "`--average clean` counts MATH-500-Clean instead." in table


def test_crop_is_set_beside_the_strongest_of_its_budget():
    averages = {("crop", 0.1): 0.4, ("crop", 0.2): 0.5, ("tip", 0.1): 0.3, ("tip", 0.2): 0.45, ("entropy", 0.2): 0.2}
    averages |= {("opd", 0.1): 0.35, ("crop-ent", 0.1): 0.9}
    runs = []
    for (method, ratio), mean in averages.items():
        found = {"x": {"mean": mean, "pass": mean, "samples": 1, "problems": 20}}
        training = {"method": method, "retention_ratio": ratio}
        runs.append({"label": f"{method} {ratio}", "benchmarks": found, "training": training})
    said = [line.partition(" (points")[0] for line in main_table(runs).splitlines() if "strongest other" in line]
    # All tokens, whatever ratio their run was given, are of no budget.
    assert [line.replace("the strongest other ", "") for line in said] == [
        "crop 0.1 +5.00 over method, opd 0.1; +10.00 over hard selector, tip 0.1",
        "crop 0.2 +5.00 over method, tip 0.2; +5.00 over hard selector, tip 0.2",
    ]


def test_seeds_of_one_row_are_averaged_with_their_interval():
    runs = [results("A", "CROP", PRINTED["A"]["CROP"]) for _ in range(2)]
    runs[1]["benchmarks"] = {name: {**row, "mean": row["mean"] + 0.01} for name, row in runs[1]["benchmarks"].items()}
    row = shown(main_table(runs))[2]
    # Student's t with one degree of freedom: 12.706 times half the distance.
    assert row[:4] == ["CROP", "27.28 (20.9 to 33.6)", "8.83", "23.33"]


def test_settings_are_joined_and_compared_each_by_itself():
    settings = {
        setting: {label: results(setting, label, numbers) for label, numbers in list(rows.items())[-2:]}
        for setting, rows in PRINTED.items()
    }
    for runs in settings.values():
        for result in runs.values():
            for row in result["benchmarks"].values():
                right = round(row["mean"] * row["problems"])
                row |= {"verdicts": {str(n): [int(n < right)] for n in range(row["problems"])}}
                row |= {"average_length": None, "format_failures": 0.0, "truncated": 0.0}
    compared = {setting: comparison(runs, "TA-OPD") for setting, runs in settings.items()}
    text = comparison_markdown(settings, compared)
    assert text.count("| Setting |") == 1 and "## Differences against TA-OPD (points), setting B" in text
    assert "## Diagnostics, setting A" in text
    with pytest.raises(ValueError, match="`--reference` 'Base' is none of the runs TA-OPD, CROP"):
        comparison(settings["A"], "Base")
