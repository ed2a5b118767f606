"""Results as Markdown: one run, and the paper's tables for several."""

from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np

from ..methods import METHODS
from ..text import markdown_table
from .benchmarks import CLEAN
from .metrics import compare, runs_interval
from .run import asked_otherwise, averaged

# What the paper calls hard selectors, but for its own.
HARD_SELECTORS = ("entropy", "tip", "ta-opd")
Results = Mapping[str, Any]  # the content of a `results.json`


def percent(value: float | None, digits: int = 2) -> str:
    """A share as the paper's main table prints it, without the sign: halves go up, and 98 of 320 is 30.63."""
    if value is None:
        return "-"
    exact = Decimal(str(round(100 * value, 9)))  # 30.625, where the float may lie a hair below it
    return str(exact.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def between(interval: Sequence[float] | None, sign: str = "") -> str:
    """An interval of shares, or with the sign "+" of a difference, in per cent; nothing where there is none."""
    return f"{100 * interval[0]:{sign}.1f} to {100 * interval[1]:{sign}.1f}" if interval else ""


def has_budget(method: str) -> bool:
    """Whether a method keeps a share of the tokens that is set: not one that keeps all, or the untrained student."""
    return method != "base" and (method not in METHODS or METHODS[method].score is not None)


def _how_drawn(results: Results) -> list[str]:
    """How the responses were sampled and asked for, a phrase for each setting."""
    decoding = results["decoding"]
    modes = {True: "thinking on", False: "thinking off"}
    options = dict(decoding["chat_template_kwargs"])
    chat = ["chat messages", modes.get(options.pop("enable_thinking", None), "the template's thinking mode")]
    chat += [f"{name} {value}" for name, value in options.items()]
    template = results["prompt_template"].replace("\n", "⏎")
    return [
        f"{results['sampler']} sampler",
        f"temperature {decoding['temperature']}",
        f"top-p {decoding['top_p']}",
        f"at most {decoding['max_tokens']} new tokens",
        *(chat if decoding["conversational"] else ["plain text"]),
        f"prompts `{template}`",
    ]


def run_markdown(results: Mapping[str, Any]) -> str:
    """The results of one run."""
    trained = results.get("asked_in_training")
    pinned = f" at revision `{results['model_revision']}`" if results.get("model_revision") else ""
    others = asked_otherwise({**results, **results["decoding"]}, trained or {})
    as_trained = f", otherwise than in training ({'; '.join(others)})" if others else ", as in training"
    lines = [
        f"# {results.get('label') or results['model']}",
        "",
        f"`{results['model']}`{pinned}, {', '.join(_how_drawn(results))}{as_trained if trained else ''}. In brackets: "
        "95 % intervals over problems.",
        "",
    ]
    extra = sorted({int(k) for row in results["benchmarks"].values() for k in row["pass_at"]})
    header = ["Benchmark", "Problems", "Seeds", "Mean (%)", "Pass (%)", *(f"Pass@{k}, unbiased (%)" for k in extra)]
    rows = []
    for name, row in results["benchmarks"].items():
        k, seeds = row["samples"], row["seeds"]
        drawn_with = f"{seeds[0]}-{seeds[-1]}" if k > 1 else seeds[0]
        shares = (f"@{k}: {percent(row[x])} ({between(row[f'{x}_interval'])})" for x in ("mean", "pass"))
        further = (percent(row["pass_at"].get(str(k))) for k in extra)
        rows.append([name, row["problems"], drawn_with, *shares, *further])
    lines.append(markdown_table(header, rows, right=True))
    lines.append(
        f"Avg. {percent(results['average'])} ({between(results['average_interval'])}): the mean of the unrounded "
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
        row = [run, "-" if budget is None else percent(budget, 1) + "%"]
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


def bold_maxima(values: Sequence[Sequence[float | None]]) -> list[list[str]]:
    """Shares as text, the largest of each column marked, ties included, as the paper does."""
    texts = [[percent(value) for value in row] for row in values]
    best = [percent(max((value for value in column if value is not None), default=None)) for column in zip(*values)]
    return [[f"**{t}**" if t == top != "-" else t for t, top in zip(row, best)] for row in texts]


def shared_benchmarks(runs: Iterable[Results]) -> list[str]:
    """The benchmarks that all runs have. Raises `ValueError` for other problems or numbers of samples."""
    runs = list(runs)
    shared = [name for name in runs[0]["benchmarks"] if all(name in results["benchmarks"] for results in runs)]
    for name in shared:
        kinds = sorted({(r["benchmarks"][name]["samples"], r["benchmarks"][name]["problems"]) for r in runs})
        if len(kinds) > 1:
            raise ValueError(f"The runs differ in samples or problems of {name!r} ({kinds}); evaluate them alike.")
    return shared


def main_table(runs: Sequence[Results], average: str = "clean") -> str:
    """The paper's main table: a row for each `label` of each `setting`, the best of a setting in bold; below it how far
    CROP is above the strongest others. Runs of one label and setting are training seeds: their mean is shown, and after
    Avg. its 95 % interval. `average` counts clean subsets (`"clean"`) or what they were taken from (`"whole"`)."""
    shared = shared_benchmarks(runs)
    lacked = dict.fromkeys(name for results in runs for name in results["benchmarks"] if name not in shared)
    left_out = [f"Left out, as some runs lack them: {', '.join(lacked)}.\n"] if lacked else []
    if not shared:
        return "".join(left_out)
    counted, first = averaged(shared, average), runs[0]["benchmarks"]
    settings = list(dict.fromkeys(results.get("setting") for results in runs))
    several = len(settings) > 1
    header = [*(["Setting"] if several else []), "Method", "Avg."]
    for name in shared:
        header += [f"{name} {kind}@{first[name]['samples']}" for kind in ("Mean", "Pass")]
    rows, lines = [], []
    for setting in settings:
        groups: dict[str, list[Results]] = {}
        for results in runs:
            if results.get("setting") == setting:
                groups.setdefault(results["label"], []).append(results)
        averages = {label: [_average(results, counted) for results in group] for label, group in groups.items()}
        values = [
            [
                float(np.mean(averages[label])),
                *(np.mean([r["benchmarks"][b][key] for r in group]) for b in shared for key in ("mean", "pass")),
            ]
            for label, group in groups.items()
        ]
        for label, texts in zip(groups, bold_maxima(values)):
            if interval := runs_interval(averages[label], (0, 1)):
                texts[0] += f" ({between(interval)})"
            rows.append([*([setting] if several else []), label, *texts])
        methods = {label: _method(group[0]) for label, group in groups.items()}
        above = _above_the_strongest(methods, {label: float(np.mean(a)) for label, a in averages.items()})
        lines += [f"Setting {setting}: {line}" if several else line for line in above]
    caption = _caption(shared, counted, first)
    return "\n".join([markdown_table(header, rows, right=True), caption, *left_out, *lines])


def _average(results: Results, counted: Sequence[str]) -> float:
    return float(np.mean([results["benchmarks"][name]["mean"] for name in counted]))


def _method(results: Results) -> tuple[str, float | None]:
    """Method and budget, as far as they are known."""
    training = results.get("training") or {}
    method = training.get("method") or results["label"].lower()
    return method, training.get("retention_ratio") if has_budget(method) else None


def _caption(shared: Sequence[str], counted: Sequence[str], benchmarks: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{name} ({benchmarks[name]['problems']} problems)" for name in counted)
    lines = [f"Avg. is the mean of the unrounded Means of {sizes}; the largest value of a column is bold."]
    others = [name for name in shared if name not in counted]
    if others:
        other = "whole" if others[0] + CLEAN in counted else "clean"
        lines.append(f"`--average {other}` counts {' and '.join(others)} instead.")
    return " ".join(lines) + "\n"


def _above_the_strongest(methods: Mapping[str, tuple[str, float | None]], averages: Mapping[str, float]) -> list[str]:
    """How far each row of `crop` is above the best other method, and the best other hard selector, at its budget."""
    lines = []
    for label, (method, budget) in methods.items():
        if method != "crop":
            continue
        at_budget = {other: name for other, (name, own) in methods.items() if None in (own, budget) or own == budget}
        others = [other for other, name in at_budget.items() if not name.startswith("crop")]
        parts = [
            f"{100 * (averages[label] - averages[best]):+.2f} over the strongest other {kind}, {best}"
            for kind, among in (("method", at_budget.values()), ("hard selector", HARD_SELECTORS))
            if (best := max((o for o in others if at_budget[o] in among), key=averages.__getitem__, default=None))
        ]
        if parts:
            lines.append(f"{label} {'; '.join(parts)} (points of Avg.; the strongest was chosen on these numbers).\n")
    return lines


def comparison(runs: Mapping[str, Results], reference: str | None = None, average: str = "clean") -> dict[str, Any]:
    """Several runs beside each other, on the benchmarks that all have, with paired tests against one of them."""
    names = list(runs)
    if len(names) < 2:
        raise ValueError(f"`--compare` has one run, {names[0]!r}; give at least two, as in NAME=DIR NAME=DIR.")
    reference = names[0] if reference is None else reference
    if reference not in runs:
        raise ValueError(f"`--reference` {reference!r} is none of the runs {', '.join(names)}; give one of them.")
    shared = shared_benchmarks(runs.values())
    if not shared:
        raise ValueError("`--compare`: the runs share no benchmark; evaluate them on the same ones.")
    counted = averaged(shared, average)
    out: dict[str, Any] = {"reference": reference, "benchmarks": shared, "averaged": counted, "runs": {}}
    for name, results in runs.items():
        entry: dict[str, Any] = {"average": _average(results, counted)}
        if name != reference:
            own, other = ({b: r["benchmarks"][b]["verdicts"] for b in shared} for r in (results, runs[reference]))
            entry["difference"] = vars(compare(*({b: side[b] for b in counted} for side in (own, other))))
            entry["differences"] = {b: vars(compare({b: own[b]}, {b: other[b]})) for b in shared}
        out["runs"][name] = entry
    return out


def comparison_markdown(
    settings: Mapping[str | None, Mapping[str, Results]], compared: Mapping[str | None, Mapping], average: str = "clean"
) -> str:
    """The main table over all settings; then for each setting (to its runs by name) differences and diagnostics;
    `compared` has the [`comparison`] of each."""
    named = [
        {**results, "label": name, "setting": setting}
        for setting, runs in settings.items()
        for name, results in runs.items()
    ]
    lines = ["## Results (%)", "", main_table(named, average)]
    for setting, runs in settings.items():
        where = f", setting {setting}" if len(settings) > 1 else ""
        against = compared[setting]["reference"]
        lines += [f"## Differences against {against} (points){where}", "", _differences(compared[setting])]
        drawn = {run: _how_drawn(results) for run, results in runs.items() if "prompt_template" in results}
        own = {
            run: [part for part in parts if any(part not in others for others in drawn.values())]
            for run, parts in drawn.items()
        }
        if any(own.values()):
            said = "; ".join(f"{run} with {', '.join(parts) or 'nothing more'}" for run, parts in own.items())
            lines.append(f"The responses were not drawn alike: {said}.\n")
        lines += [f"## Diagnostics{where}", "", diagnostics_table(runs)]
    return "\n".join(lines)


def _differences(compared: Mapping[str, Any]) -> str:
    rows = []
    for run, entry in compared["runs"].items():
        if run == compared["reference"]:
            continue
        row = [run]
        for difference in (entry["difference"], *entry["differences"].values()):
            interval = between((difference["low"], difference["high"]), "+")
            row.append(f"{100 * difference['difference']:+.2f} ({interval}), p = {difference['p_value']:.3g}")
        rows.append(row)
    return markdown_table(["Method", "Avg.", *compared["benchmarks"]], rows, right=True) + (
        "\nIn brackets: 95 % intervals over problems; p: two-sided paired permutation test over problems. "
        "Both are about these checkpoints, not about other training seeds.\n"
    )
