"""The paper's tables on the budget, from their numbers; means over seeds, gaps and references."""

from paper import BUDGETS

from crop_trl.analysis.budget_curves import StudentAccuracy
from crop_trl.analysis.budget_tables import budget_markdown


def runs(method: str, numbers: dict, seed: int | None = None) -> list[StudentAccuracy]:
    return [StudentAccuracy(method, ratio / 100, float(text) / 100, seed) for ratio, text in numbers.items()]


def cells(table: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line]
    return {row[0]: row[1:] for row in rows}


def test_the_papers_tables_of_pairs():
    everything = [run for name, numbers in BUDGETS.items() for run in runs(name, numbers)]
    whole, student, entropy = budget_markdown(everything).split("## ")[1:]
    assert cells(whole)["Method"] == [f"{ratio} %" for ratio in BUDGETS["crop"]]
    assert cells(whole)["crop-student"][4:] == ["-"] * 3 and "strongest" not in whole
    table = cells(student)
    assert table["crop"][:4] == ["**26.26**", "**25.93**", "**25.94**", "**26.78**"]
    assert table["crop-student"][:4] == ["25.90", "25.77", "25.05", "26.21"]
    assert table["crop over crop-student"] == ["+0.36", "+0.16", "+0.89", "+0.57", "-", "-", "-"]
    table = cells(entropy)
    assert table["crop-ent"] == ["-", "23.58", "-", "23.89", "24.76", "**24.84**", "24.15"]
    # The text's differences: 2.35, 2.89, 0.84, -0.38, 0.65.
    assert table["crop over crop-ent"] == ["-", "+2.35", "-", "+2.89", "+0.84", "-0.38", "+0.65"]


def test_gains_over_the_strongest_selector_and_over_every_token():
    swept = [*runs("crop", {5: "26.26", 20: "26.78"}), *runs("tip", {5: "24.67", 20: "23.78"})]
    swept += [*runs("ta-opd", {5: "24", 20: "25.37"}), StudentAccuracy("opd", None, 0.2382)]
    swept += [StudentAccuracy("base", None, 0.21)]
    text = budget_markdown(swept)
    table = cells(text)
    assert table["Method"] == ["5 %", "20 %", "all tokens"] and table["opd"] == ["-", "-", "**23.82**"]
    assert table["crop over the strongest other selector"] == ["+1.59, tip", "+1.41, ta-opd", "-"]
    assert table["crop over opd"] == ["+2.44", "+2.96", "-"]
    assert text.count("## ") == 1 and text.endswith("\nBefore training: 21.00.\n")


def test_seeds_are_paired():
    seeds = [(0.5, 0.4), (0.6, 0.6), (0.7, 0.5)]
    several = [StudentAccuracy("crop", 0.2, ours, seed) for seed, (ours, _) in enumerate(seeds)]
    several += [StudentAccuracy("crop-ent", 0.2, theirs, seed) for seed, (_, theirs) in enumerate(seeds)]
    table = cells(budget_markdown(several).split("## ")[2])
    # Standard deviation 0.1 over three: 4.303 * 0.1 / sqrt(3) = 0.248, of the accuracies as of their differences.
    assert table["crop"] == ["**60.00** (35.2 to 84.8)"] and table["crop-ent"] == ["50.00 (25.2 to 74.8)"]
    assert table["crop over crop-ent"] == ["+10.00 (-14.8 to +34.8)"]
