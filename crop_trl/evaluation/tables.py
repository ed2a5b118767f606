"""Results as Markdown: one run, and the paper's tables for several."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..text import markdown_table
from .metrics import compare
from .run import averaged


def percent(value: float | None, digits: int = 2) -> str:
    """A share as the paper prints it, without the sign."""
    return "-" if value is None else f"{100 * value:.{digits}f}"


def _interval(interval: list[float] | tuple[float, float]) -> str:
    return f"{percent(interval[0], 1)} to {percent(interval[1], 1)}"


def _one_line(template: str) -> str:
    return template.replace("\n", "⏎")


def run_markdown(results: Mapping[str, Any]) -> str:
    """The results of one run."""
    decoding = results["decoding"]
    thinking = {True: "thinking on", False: "thinking off", None: "the template's thinking mode"}[decoding["thinking"]]
    lines = [
        f"# {results.get('label') or results['model']}",
        "",
        f"`{results['model']}`, {results['sampler']} sampler, temperature {decoding['temperature']}, top-p "
        f"{decoding['top_p']}, at most {decoding['max_tokens']} new tokens, {thinking}; prompts "
        f"`{_one_line(results['prompt_template'])}`. In brackets: 95 % intervals over problems.",
        "",
    ]
    extra = sorted({int(k) for row in results["benchmarks"].values() for k in row["pass_at"]})
    header = ["Benchmark", "Problems", "Seeds", "Mean (%)", "Pass (%)", *(f"Pass@{k}, unbiased (%)" for k in extra)]
    rows = []
    for name, row in results["benchmarks"].items():
        k, seeds = row["samples"], row["seeds"]
        drawn_with = f"{seeds[0]}-{seeds[-1]}" if k > 1 else seeds[0]
        shares = (f"@{k}: {percent(row[x])} ({_interval(row[f'{x}_interval'])})" for x in ("mean", "pass"))
        further = (percent(row["pass_at"].get(str(k))) for k in extra)
        rows.append([name, row["problems"], drawn_with, *shares, *further])
    lines.append(markdown_table(header, rows, right=True))
    lines.append(
        f"Avg. {percent(results['average'])} ({_interval(results['average_interval'])}): the mean of the unrounded "
        f"Means of {', '.join(results['averaged'])}.\n"
    )
    for name, row in results["benchmarks"].items():
        if row["ungraded"]:
            lines.append(
                f"No verdict on {row['ungraded']} of {row['responses']} responses of {name}, which count as wrong: "
                "grading them failed. `--regrade` grades them again.\n"
            )
    lines.append(diagnostics_table({results.get("label") or results["model"]: results}))
    return "\n".join(lines)


def diagnostics_table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Lengths, format failures and truncation (table "Available generation diagnostics")."""
    names = list(dict.fromkeys(name for results in runs.values() for name in results["benchmarks"]))
    header = ["Method", "Budget", "Train Trunc."]
    for name in names:
        header += [f"{name} Avg. Len.", f"{name} Format Fail.", f"{name} Trunc."]
    rows = []
    for run, results in runs.items():
        training = results.get("training") or {}
        budget = training.get("budget")
        row = [run, "-" if budget is None else f"{100 * budget:.0f}%"]
        row.append("-" if training.get("truncated") is None else percent(training["truncated"]) + "%")
        for name in names:
            entry = results["benchmarks"].get(name)
            if entry is None:
                row += ["-"] * 3
            else:
                length = entry["average_length"]
                row += ["-" if length is None else f"{length:,.2f}"]
                row += [percent(entry[key]) + "%" for key in ("format_failures", "truncated")]
        rows.append(row)
    return markdown_table(header, rows, right=True)


def _bold_maxima(values: list[list[float]]) -> list[list[str]]:
    """Shares as text, the largest of each column marked, ties included, as the paper does."""
    texts = [[percent(value) for value in row] for row in values]
    best = [percent(max(column)) for column in zip(*values)]
    return [[f"**{text}**" if text == top else text for text, top in zip(row, best)] for row in texts]


def comparison(runs: Mapping[str, Mapping[str, Any]], reference: str | None = None) -> dict[str, Any]:
    """Several runs beside each other, on the benchmarks that all have, with paired tests against one of them."""
    names = list(runs)
    if len(names) < 2:
        raise ValueError(f"`--compare` has one run, {names[0]!r}; give at least two, as in NAME=DIR NAME=DIR.")
    reference = names[0] if reference is None else reference
    if reference not in runs:
        raise ValueError(f"`--reference` {reference!r} is none of the runs {', '.join(names)}.")
    first = runs[names[0]]["benchmarks"]
    shared = averaged([name for name in first if all(name in results["benchmarks"] for results in runs.values())])
    if not shared:
        raise ValueError("`--compare`: the runs share no benchmark; evaluate them on the same ones.")
    for name in shared:
        kinds = {(r["benchmarks"][name]["samples"], r["benchmarks"][name]["problems"]) for r in runs.values()}
        if len(kinds) > 1:
            raise ValueError(
                f"`--compare`: the runs differ in samples or problems of {name!r} ({sorted(kinds)}); evaluate them "
                "alike."
            )

    out: dict[str, Any] = {"reference": reference, "benchmarks": shared, "runs": {}}
    for name, results in runs.items():
        entry: dict[str, Any] = {"average": float(np.mean([results["benchmarks"][b]["mean"] for b in shared]))}
        if name != reference:
            own, other = ({b: r["benchmarks"][b]["verdicts"] for b in shared} for r in (results, runs[reference]))
            entry["difference"] = vars(compare(own, other))
            entry["differences"] = {b: vars(compare({b: own[b]}, {b: other[b]})) for b in shared}
        out["runs"][name] = entry
    return out


def comparison_markdown(runs: Mapping[str, Mapping[str, Any]], reference: str | None = None) -> str:
    """The paper's main table, its differences, and its diagnostics for several runs."""
    compared = comparison(runs, reference)
    shared, reference = compared["benchmarks"], compared["reference"]
    header = ["Method", "Avg."]
    for name in shared:
        k = next(iter(runs.values()))["benchmarks"][name]["samples"]
        header += [f"{name} Mean@{k}", f"{name} Pass@{k}"]
    values = [
        [compared["runs"][run]["average"], *(results["benchmarks"][b][key] for b in shared for key in ("mean", "pass"))]
        for run, results in runs.items()
    ]
    texts = _bold_maxima(values)
    lines = [
        "## Results (%)",
        "",
        markdown_table(header, [[run, *row] for run, row in zip(runs, texts)], right=True),
        f"Avg. is the mean of the unrounded Means of {', '.join(shared)}; the largest value of a column is bold.\n",
        f"## Differences against {reference} (points)",
        "",
    ]
    rows = []
    for run, entry in compared["runs"].items():
        if run == reference:
            continue
        row = [run]
        for difference in (entry["difference"], *entry["differences"].values()):
            low, high = 100 * difference["low"], 100 * difference["high"]
            row.append(
                f"{100 * difference['difference']:+.2f} ({low:+.1f} to {high:+.1f}), p = {difference['p_value']:.3g}"
            )
        rows.append(row)
    lines.append(markdown_table(["Method", "Avg.", *shared], rows, right=True))
    lines.append(
        "In brackets: 95 % intervals over problems; p: two-sided paired permutation test over problems. "
        "Both are about these checkpoints, not about other training seeds.\n"
    )
    templates = {run: results.get("prompt_template") for run, results in runs.items()}
    if len(set(templates.values()) - {None}) > 1:
        said = "; ".join(f"{run} `{_one_line(template)}`" for run, template in templates.items() if template)
        lines.append(f"The runs were asked with different prompts: {said}.\n")
    lines += ["## Diagnostics", "", diagnostics_table(runs)]
    return "\n".join(lines)
