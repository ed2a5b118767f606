"""What became of the problems, as tables: outcomes, confidences, condition types, reasons for rejection, cost."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..files import write_text
from .costs import Account, find_prices
from .ledger import read_entries
from .outputs import OutputDirectory
from .reading import CONFIDENCES
from .source import duplicates_line
from .validation import REJECTIONS, rejection_reasons

OUTCOMES = {
    "strict_pass": "First-round strict pass",
    "repaired_pass": "Repaired pass",
    "needs_review": "Complete but needs review",
    "pending_repair": "Incomplete after generation/repair",
    "excluded_input": "Pre-generation input exclusion",
}
CONFIDENCE_NAMES = dict(zip(CONFIDENCES, ("Paraphrase", "Counterfactual", "Overall"), strict=True))
LISTED_TYPES = 12
LONGEST_LABEL = 60  # characters of a condition type in the table; report.json has all of them
SMALLEST_SAMPLE = 10  # records judged, before Cohen's kappa says anything


def build_report(
    records: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    account: Account,
    reviews: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """
    Count everything the report shows.

    Args:
        records (sequence of mappings): All records of a run.
        run (`Mapping`): What [`OutputDirectory.load_run`] returns.
        account ([`Account`]): Requests and tokens of the ledger.
        reviews (`Mapping`): What [`OutputDirectory.load_reviews`] returns.

    Returns:
        Plain data, as it is written to `report.json`.
    """
    threshold = run["settings"]["threshold"]
    # Stated by the run that ended: the records may be those of other inputs as well.
    unfinished = run.get("unfinished", max(0, run["input"]["problems"] - len(records)))
    total = len(records) + unfinished
    statuses = Counter(record["status"] for record in records)
    accepted = [record for record in records if record["validation_passed"] and record["usable_for_training"]]
    repair_eligible = statuses["repaired_pass"] + statuses["needs_review"] + statuses["pending_repair"]
    types = Counter(record["condition_type"].strip().lower() for record in accepted)
    in_review = [record for record in records if record["status"] == "needs_review"]
    flaws: Counter = Counter()
    for record in records:
        for current in record.get("rounds", ()):
            flaws.update(current["flaws"])
            if current["failed"]:
                flaws[f"request:{current['failed'].split(':')[0]}"] += 1
    return {
        "problems": total,
        "outcomes": {status: statuses[status] for status in OUTCOMES},
        "unfinished": unfinished,
        "begun": {"started": run["begun"]["started"], "problems": run["begun"]["input"]["problems"]}
        if "begun" in run
        else None,
        "rejected_by_a_person": sum(is_rejected_by_person(record) for record in records),
        "validated": len(accepted),
        "alternates": sum(len(record["alternates"]) for record in accepted),
        "repair": {"eligible": repair_eligible, "passed": statuses["repaired_pass"]},
        "threshold": threshold,
        "confidence": {name: _summary(record["critic"][name] for record in accepted) for name in CONFIDENCES},
        "condition_types": {
            "distinct": len(types),
            "most_frequent": sorted(types.items(), key=lambda item: (-item[1], item[0]))[:LISTED_TYPES],
        },
        "diagnostics": _diagnostics(in_review, threshold),
        "unusable_answers": dict(sorted(flaws.items())),
        "incomplete_reasons": dict(Counter(map(_incomplete_reason, _with_status(records, "pending_repair")))),
        "excluded_reasons": dict(Counter(r["excluded_reason"] for r in _with_status(records, "excluded_input"))),
        "warnings": sum(bool(record["warnings"]) for record in accepted),
        "selection_differs": sum(map(_selection_differs, accepted)),
        "duplicates": run["input"]["duplicates"],
        "retries": run.get("retries", {}),
        "stopped": run.get("error") or run.get("stopped"),
        "cost": {
            "dollars": account.cost,
            "requests": dict(account.requests),
            "tokens": {kind: dict(tokens) for kind, tokens in account.tokens.items()},
            "estimated": account.estimated,
        },
        "model": run["settings"]["model"],
        "templates": run["templates"]["version"],
        "human_review": _agreement(records, reviews),
    }


def write_report(directory: str) -> str:
    """
    Write `report.json` and `report.md` of an output directory.

    Returns:
        The Markdown.

    Raises:
        `ValueError`: no run in this directory.
    """
    output = OutputDirectory(directory)
    run = output.load_run()
    settings = run["settings"]
    prices = find_prices(
        settings["model"], settings["price_input"], settings["price_output"], settings["price_cached_input"]
    )
    account = Account(prices).add_entries(read_entries(output.ledger))
    report = build_report(output.load_records(), run, account, output.load_reviews())
    output.write_json(output.report_json, report)
    markdown = to_markdown(report)
    write_text(output.report_markdown, markdown)
    return markdown


def is_rejected_by_person(record: Mapping[str, Any]) -> bool:
    """Whether a person's rejection is on the record."""
    return record.get("human_review", {}).get("verdict") == "reject"


def to_markdown(report: Mapping[str, Any]) -> str:
    """The report as Markdown tables that also read well in a terminal."""
    total, accepted = report["problems"], report["validated"]
    outcomes = [(label, report["outcomes"][status]) for status, label in OUTCOMES.items()]
    if report["unfinished"]:
        outcomes.append(("Not finished (run again)", report["unfinished"]))
    closing = [("**Final validated training subset**", accepted)]
    if report["rejected_by_a_person"]:
        closing.insert(0, ("Rejected by a person", report["rejected_by_a_person"]))
    repair = report["repair"]
    parts = [
        "# Triplet report",
        f"{total:,} problems, model {report['model']}, templates {report['templates']}.",
        "## Terminal outcomes",
        _table(("Terminal outcome", "Count", "Input share"), _with_share(outcomes + closing, total)),
        f"Repair success rate: {repair['passed']:,} of {repair['eligible']:,} records that the first round left open "
        f"({_share(repair['passed'], repair['eligible'])}). Further passing candidates kept as alternates: "
        f"{report['alternates']:,}.",
        f"## Critic-assigned confidence over the {accepted:,} accepted triplets",
        _table(
            ("Decision", "Mean", "5th pct.", "Median", "Minimum"),
            [
                (label, *(_number(row[key], digits) for key, digits in _CONFIDENCE_COLUMNS))
                for name, label in CONFIDENCE_NAMES.items()
                for row in [report["confidence"][name]]
            ],
        ),
        "The critic reports these values itself; they are not calibrated.",
        f"## Most frequent condition types ({report['condition_types']['distinct']:,} distinct labels)",
        _types_table(report["condition_types"], accepted),
        "Labels are lower-cased and otherwise not merged.",
        f"## Diagnostics of the {report['diagnostics']['records']:,} records that need review",
        _table(
            ("Diagnostic", "Count", "Share"),
            _with_share(
                [
                    (_diagnostic_label(name, report["threshold"]), count)
                    for name, count in report["diagnostics"]["counts"]
                ],
                report["diagnostics"]["records"],
            ),
        ),
        "Not exclusive: one record can stand in several rows.",
        "## Answers that could not be used in full",
        _table(("What", "Times"), [(name, f"{count:,}") for name, count in report["unusable_answers"].items()]),
        *_reason_lines(report),
        "## Cost",
        _cost_lines(report["cost"]),
        *_review_lines(report["human_review"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_CONFIDENCE_COLUMNS = (("mean", 3), ("p05", 2), ("median", 2), ("minimum", 2))


def _summary(values: Iterable[float]) -> dict[str, float | None]:
    values = np.fromiter(values, dtype=np.float64)
    if not values.size:
        return dict.fromkeys(("mean", "p05", "median", "minimum"))
    low, median = np.quantile(values, (0.05, 0.5))
    return {"mean": float(values.mean()), "p05": float(low), "median": float(median), "minimum": float(values.min())}


def _diagnostics(records: Sequence[Mapping[str, Any]], threshold: float) -> dict[str, Any]:
    counts: Counter = Counter()
    for record in records:
        if record["critic"] is None:
            counts["critic_missing"] += 1
        else:
            counts.update(rejection_reasons(record["critic"], threshold))
        counts.update(f"found_here:{violation}" for violation in record["violations"])
    return {"records": len(records), "counts": sorted(counts.items(), key=lambda item: (-item[1], item[0]))}


def _diagnostic_label(name: str, threshold: float) -> str:
    if name == "critic_missing":
        return "Missing structured critic result"
    if name.startswith("found_here:"):
        return f"Check without a model: {name.split(':')[1].replace('_', ' ')}"
    return REJECTIONS[name].format(threshold=threshold)


def _with_status(records: Iterable[Mapping[str, Any]], status: str) -> list[Mapping[str, Any]]:
    return [record for record in records if record["status"] == status]


def _incomplete_reason(record: Mapping[str, Any]) -> str:
    last = record["rounds"][-1]
    if last["failed"]:
        return "request failed"
    generator = [name.split(":")[1] for name in last["flaws"] if name.startswith("generator:")]
    return generator[0].replace("_", " ") if generator else "no candidate"


def _selection_differs(record: Mapping[str, Any]) -> bool:
    return record["rounds"][record["round"] - 1]["critic_selected"] != record["candidate_number"]


def _agreement(records: Sequence[Mapping[str, Any]], reviews: Mapping[str, Any]) -> dict[str, Any] | None:
    """How people and the critic's acceptance agree, over the records that people have accepted or rejected."""
    if not reviews:
        return None
    table: Counter = Counter()
    for record in records:
        verdict = record.get("human_review", {}).get("verdict")
        if verdict in ("accept", "reject"):
            critic = "accept" if record["status"] in ("strict_pass", "repaired_pass") else "reject"
            table[f"critic_{critic}_person_{verdict}"] += 1
        elif verdict:
            table["unsure"] += 1
    both = {(c, p): table[f"critic_{c}_person_{p}"] for c in ("accept", "reject") for p in ("accept", "reject")}
    judged = sum(both.values())
    agreed = both["accept", "accept"] + both["reject", "reject"]
    critic_accepts = both["accept", "accept"] + both["accept", "reject"]
    person_accepts = both["accept", "accept"] + both["reject", "accept"]
    kappa = undefined = None
    if judged < SMALLEST_SAMPLE:
        undefined = f"fewer than {SMALLEST_SAMPLE} records judged"
    elif critic_accepts in (0, judged) or person_accepts in (0, judged):
        undefined = "one side gave only one kind of verdict"
    else:
        chance = (critic_accepts * person_accepts + (judged - critic_accepts) * (judged - person_accepts)) / judged**2
        kappa = (agreed / judged - chance) / (1 - chance)
    verdicts = sum(map(len, reviews.values()))
    return {
        "verdicts": verdicts,
        "outdated": verdicts - judged - table["unsure"],
        "judged": judged,
        "agreed": agreed,
        "cohens_kappa": kappa,
        "kappa_undefined": undefined,
        "table": dict(table),
    }


def _types_table(types: Mapping[str, Any], accepted: int) -> str:
    listed = types["most_frequent"]
    rows = [(_plain(label, LONGEST_LABEL) or "(empty)", count) for label, count in listed]
    others = accepted - sum(count for _, count in listed)
    if others:
        rows.append(("All other labels", others))
    return _table(("Condition type", "Count", "Share"), _with_share(rows, accepted))


def _reason_lines(report: Mapping[str, Any]) -> list[str]:
    def listed(title: str, counts: Mapping[str, int]) -> str:
        return f"{title}: {', '.join(f'{count:,} {name}' for name, count in counts.items())}." if counts else ""

    return [
        listed("Incomplete because of", report["incomplete_reasons"]),
        listed("Excluded because of", report["excluded_reasons"]),
        listed("Repeated requests", report["retries"]),
        duplicates_line(report["duplicates"]),
        f"Accepted triplets with a warning (see `warnings`): {report['warnings']:,}. Accepted triplets that are not "
        f"the critic's own selection: {report['selection_differs']:,}.",
        f"The run ended early: {_plain(report['stopped'], 400)}." if report["stopped"] else "",
        f"A later run over {begun['problems']:,} problems began at {begun['started']} and has not ended: it is still "
        "going on, or was killed. Its answers are in the ledger; run it again to have its records here."
        if (begun := report["begun"])
        else "",
    ]


def _cost_lines(cost: Mapping[str, Any]) -> str:
    rows = [
        (kind, *(f"{number:,}" for number in (requests, *(cost["tokens"][kind].get(name, 0) for name in _TOKENS))))
        for kind, requests in sorted(cost["requests"].items())
    ]
    lines = _table(("Request", "Answers", "Input tokens", "of them cached", "Output tokens"), rows)
    price = "unknown (give prices)" if cost["dollars"] is None else f"${cost['dollars']:,.2f}"
    lines += f"\n\nCost of all answers in the ledger: {price}."
    if cost["estimated"]:
        lines += (
            f" {cost['estimated']:,} answers came without token counts; theirs are estimated from the length of the "
            "texts, and thinking that an answer does not show is not in them."
        )
    return lines


_TOKENS = ("input", "cached_input", "output")


def _review_lines(review: Mapping[str, Any] | None) -> list[str]:
    if review is None:
        return []
    table = review["table"]
    rows = [
        (
            f"Critic {critic}s",
            *(str(table.get(f"critic_{critic}_person_{person}", 0)) for person in ("accept", "reject")),
        )
        for critic in ("accept", "reject")
    ]
    undefined = review["kappa_undefined"]
    kappa = f"not defined ({undefined})" if undefined else f"{review['cohens_kappa']:.2f}"
    return [
        "## Human check",
        _table(("", "Person accepts", "Person rejects"), rows),
        f"Agreement: {review['agreed']:,} of {review['judged']:,} ({_share(review['agreed'], review['judged'])}), "
        f"Cohen's kappa {kappa}; {table.get('unsure', 0)} unsure, {review['outdated']} verdicts on earlier texts.",
    ]


def _plain(text: str, length: int) -> str:
    """Somebody else's text as Markdown that shows it and nothing else, in one line of at most so many characters."""
    text = " ".join(_INVISIBLE.sub(" ", text).split())
    text = text if len(text) <= length else text[: length - 1] + "…"
    return _MARKUP.sub(r"\\\g<0>", text)


_INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKUP = re.compile(r"[\\|`*<>\[\]~$&]|(?<!\w)_|_(?!\w)")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "None."
    widths = [max(len(row[column]) for row in [list(header), *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(cells, widths))]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 2) if n == 0 else "-" * (w + 1) + ":" for n, w in enumerate(widths))
    return "\n".join([line(header), f"|{rule}|", *map(line, rows)])


def _with_share(rows: Iterable[tuple[str, int]], total: int) -> list[tuple[str, str, str]]:
    return [(label, f"{count:,}", _share(count, total)) for label, count in rows]


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.2f} %" if total else "-"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
