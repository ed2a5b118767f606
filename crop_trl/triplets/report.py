"""What became of the problems, as tables: outcomes, confidences, condition types, reasons for rejection, cost."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..files import read_entries, write_text
from ..text import markdown_table, visible_text
from .candidates import PASSED, REJECTIONS, rejection_reasons
from .costs import TOKEN_FIELDS, Account
from .outputs import OutputDirectory
from .reading import CONFIDENCES
from .source import duplicates_line

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
_SIDES = ("accept", "reject")
_CONFIDENCE_COLUMNS = (("mean", 3), ("p05", 2), ("median", 2), ("minimum", 2))


def write_report(directory: str) -> str:
    """Write `report.json` and `report.md` of an output directory, and return the Markdown."""
    output, report = OutputDirectory(directory), read_report(directory)
    output.write_json(output.report_json, report)
    markdown = to_markdown(report)
    write_text(output.report_markdown, markdown)
    return markdown


def read_report(directory: str) -> dict[str, Any]:
    """What the report on an output directory shows."""
    output = OutputDirectory(directory)
    run = output.load_run()
    account = Account().add_all(read_entries(output.ledger))
    return build_report(output.load_records(), run, account, output.load_reviews())


# --- counting --------------------------------------------------------------------------------------------------------


def build_report(
    records: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    account: Account,
    reviews: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Everything the report shows, as plain data: of all records, what `load_run` says, the ledger and the reviews."""
    threshold = run["settings"]["threshold"]
    # Stated by the run that ended: the records may be those of other inputs as well.
    unfinished = run.get("unfinished", max(0, run["input"]["problems"] - len(records)))
    by_status = {status: [record for record in records if record["status"] == status] for status in OUTCOMES}
    outcomes = {status: len(found) for status, found in by_status.items()}
    accepted = [record for record in records if record["validation_passed"] and record["usable_for_training"]]
    types = Counter(record["condition_type"].strip().lower() for record in accepted)
    flaws: Counter = Counter()
    for record in records:
        for current in record.get("rounds", ()):
            flaws.update(current["flaws"])
            if current["failed"]:
                flaws[f"request:{current['failed'].split(':')[0]}"] += 1
    begun = run.get("begun")
    return {
        "problems": len(records) + unfinished,
        "outcomes": outcomes,
        "unfinished": unfinished,
        "begun": {"started": begun["started"], "problems": begun["input"]["problems"]} if begun else None,
        # Of those that passed: the others are not in the sum that this is taken from.
        "rejected_by_a_person": sum(_verdict(record) == "reject" and record["status"] in PASSED for record in records),
        "validated": len(accepted),
        "alternates": sum(len(record["alternates"]) for record in accepted),
        "repair": {
            "eligible": outcomes["repaired_pass"] + outcomes["needs_review"] + outcomes["pending_repair"],
            "passed": outcomes["repaired_pass"],
        },
        "threshold": threshold,
        "confidence": {name: _summary(record["critic"][name] for record in accepted) for name in CONFIDENCES},
        "condition_types": {"distinct": len(types), "most_frequent": _most_frequent(types)[:LISTED_TYPES]},
        "diagnostics": _diagnostics(by_status["needs_review"], threshold),
        "unusable_answers": dict(sorted(flaws.items())),
        "incomplete_reasons": dict(Counter(map(_incomplete_reason, by_status["pending_repair"]))),
        "excluded_reasons": dict(Counter(record["excluded_reason"] for record in by_status["excluded_input"])),
        "warnings": sum(bool(record["warnings"]) for record in accepted),
        "selection_differs": sum(
            record["rounds"][record["round"] - 1]["critic_selected"] != record["candidate_number"]
            for record in accepted
        ),
        "duplicates": run["input"]["duplicates"],
        "retries": run.get("retries", {}),
        "stopped": run.get("error") or run.get("stopped"),
        "cost": {"dollars": account.cost, "rows": account.rows},
        "model": run["settings"]["model"],
        "critic_model": run["settings"].get("critic_model") or run["settings"]["model"],
        "templates": run["templates"]["version"],
        "human_review": _agreement(records, reviews),
    }


def _summary(values: Iterable[float]) -> dict[str, float | None]:
    values = np.fromiter(values, dtype=np.float64)
    if not values.size:
        return dict.fromkeys(("mean", "p05", "median", "minimum"))
    low, median = np.quantile(values, (0.05, 0.5))
    return {"mean": float(values.mean()), "p05": float(low), "median": float(median), "minimum": float(values.min())}


def _most_frequent(counts: Counter) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _diagnostics(records: Sequence[Mapping[str, Any]], threshold: float) -> dict[str, Any]:
    counts: Counter = Counter()
    for record in records:
        critic = record["critic"]
        counts.update(["critic_missing"] if critic is None else rejection_reasons(critic, threshold))
        counts.update(f"found_here:{violation}" for violation in record["violations"])
    return {"records": len(records), "counts": _most_frequent(counts)}


def _incomplete_reason(record: Mapping[str, Any]) -> str:
    last = record["rounds"][-1]
    if last["failed"]:
        return "request failed"
    generator = [name.split(":")[1] for name in last["flaws"] if name.startswith("generator:")]
    return generator[0].replace("_", " ") if generator else "no candidate"


def _verdict(record: Mapping[str, Any]) -> str | None:
    return record.get("human_review", {}).get("verdict")


def _agreement(records: Sequence[Mapping[str, Any]], reviews: Mapping[str, Any]) -> dict[str, Any] | None:
    """How people and the critic's acceptance agree, over the records that people have accepted or rejected."""
    if not reviews:
        return None
    judged = [record for record in records if _verdict(record) in _SIDES]
    # Critic accepts, person accepts -> how often.
    table = Counter((record["status"] in PASSED, _verdict(record) == "accept") for record in judged)
    unsure = sum(_verdict(record) == "unsure" for record in records)
    judged, agreed = len(judged), table[True, True] + table[False, False]
    critic_accepts = table[True, True] + table[True, False]
    person_accepts = table[True, True] + table[False, True]
    kappa = undefined = None
    if judged < SMALLEST_SAMPLE:
        undefined = f"fewer than {SMALLEST_SAMPLE} records judged"
    elif critic_accepts in (0, judged) or person_accepts in (0, judged):
        undefined = "one side gave only one kind of verdict"
    else:
        chance = (critic_accepts * person_accepts + (judged - critic_accepts) * (judged - person_accepts)) / judged**2
        kappa = (agreed / judged - chance) / (1 - chance)
    return {
        "unsure": unsure,
        "outdated": sum(map(len, reviews.values())) - judged - unsure,
        "judged": judged,
        "agreed": agreed,
        "cohens_kappa": kappa,
        "kappa_undefined": undefined,
        "table": {
            f"critic_{critic}s": {person: table[critic == "accept", person == "accept"] for person in _SIDES}
            for critic in _SIDES
        },
    }


# --- showing ---------------------------------------------------------------------------------------------------------


def to_markdown(report: Mapping[str, Any]) -> str:
    """The report as Markdown tables that also read well in a terminal."""
    total, accepted, repair = report["problems"], report["validated"], report["repair"]
    types, diagnostics = report["condition_types"], report["diagnostics"]
    critic = f", critic {report['critic_model']}" if report["critic_model"] != report["model"] else ""
    outcomes = [(label, report["outcomes"][status]) for status, label in OUTCOMES.items()]
    if report["unfinished"]:
        outcomes.append(("Not finished (run again)", report["unfinished"]))
    if report["rejected_by_a_person"]:
        outcomes.append(("Rejected by a person", report["rejected_by_a_person"]))
    outcomes.append(("**Final validated training subset**", accepted))
    listed = [(_short(label, LONGEST_LABEL) or "(empty)", count) for label, count in types["most_frequent"]]
    others = accepted - sum(count for _, count in listed)
    parts = [
        "# Triplet report",
        f"{total:,} problems, model {report['model']}{critic}, templates {report['templates']}.",
        "## Terminal outcomes",
        _shares("Terminal outcome", outcomes, total, "Input share"),
        f"Repair success rate: {repair['passed']:,} of {repair['eligible']:,} records that the first round left open "
        f"({_share(repair['passed'], repair['eligible'])}). Further passing candidates kept as alternates: "
        f"{report['alternates']:,}.",
        f"## Confidence over the {accepted:,} accepted triplets",
        _table(
            ("Decision", "Mean", "5th pct.", "Median", "Minimum"),
            [
                (label, *(_number(report["confidence"][name][key], digits) for key, digits in _CONFIDENCE_COLUMNS))
                for name, label in CONFIDENCE_NAMES.items()
            ],
        ),
        "A critic reports these values itself; they are not calibrated. With `rules` they are shares of solutions.",
        f"## Most frequent condition types ({types['distinct']:,} distinct labels)",
        _shares("Condition type", listed + ([("All other labels", others)] if others else []), accepted),
        "Labels are lower-cased and otherwise not merged.",
        f"## Diagnostics of the {diagnostics['records']:,} records that need review",
        _shares(
            "Diagnostic",
            [(_diagnostic_label(name, report["threshold"]), count) for name, count in diagnostics["counts"]],
            diagnostics["records"],
        ),
        "Not exclusive: one record can stand in several rows.",
        "## Answers that could not be used in full",
        _table(("What", "Times"), [(name, f"{count:,}") for name, count in report["unusable_answers"].items()]),
        *_reason_lines(report),
        "## Cost",
        _cost_lines(report["cost"]),
        *_review_lines(report["human_review"]),
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _diagnostic_label(name: str, threshold: float) -> str:
    if name == "critic_missing":
        return "Missing structured critic result"
    if name.startswith("found_here:"):
        return f"Check without a model: {name.split(':')[1].replace('_', ' ')}"
    return REJECTIONS[name].format(threshold=threshold)


def _reason_lines(report: Mapping[str, Any]) -> list[str]:
    def listed(title: str, counts: Mapping[str, int]) -> str:
        return f"{title}: {', '.join(f'{count:,} {name}' for name, count in counts.items())}." if counts else ""

    stopped, begun = report["stopped"], report["begun"]
    return [
        listed("Incomplete because of", report["incomplete_reasons"]),
        listed("Excluded because of", report["excluded_reasons"]),
        listed("Repeated requests", report["retries"]),
        duplicates_line(report["duplicates"]),
        f"Accepted triplets with a warning (see `warnings`): {report['warnings']:,}. Accepted triplets that are not "
        f"the critic's own selection: {report['selection_differs']:,}.",
        # As code, in which the endpoint's own words mark nothing up.
        f"The run ended early: `{_short(stopped, 400).replace('`', chr(39))}`." if stopped else "",
        f"A later run over {begun['problems']:,} problems began at {begun['started']} and has not ended: it is still "
        "going on, or was killed. Its answers are in the ledger; run it again to have its records here."
        if begun
        else "",
    ]


def _cost_lines(cost: Mapping[str, Any]) -> str:
    rows = [
        (
            row["model"],
            row["request"],
            *(f"{row[name]:,}" for name in ("answers", *TOKEN_FIELDS)),
            _dollars(row["dollars"]),
        )
        for row in cost["rows"]
    ]
    header = ("Model", "Request", "Answers", "Input tokens", "of them cached", "Output tokens", "Cost")
    lines = [_table(header, rows), "", f"Cost of all answers in the ledger: {_dollars(cost['dollars'])}."]
    unpriced = {row["model"] for row in cost["rows"] if row["dollars"] is None}
    if unpriced:
        lines.append(f"No price is known for {', '.join(sorted(unpriced))}: give prices to count its answers.")
    estimated = sum(row["estimated"] for row in cost["rows"])
    if estimated:
        lines.append(
            f"{estimated:,} answers came without token counts; theirs are estimated from the length of the texts, and "
            "thinking that an answer does not show is not in them."
        )
    return "\n".join(lines)


def _dollars(dollars: float | None) -> str:
    return "unknown" if dollars is None else f"${dollars:,.2f}"


def _review_lines(review: Mapping[str, Any] | None) -> list[str]:
    if review is None:
        return []
    undefined = review["kappa_undefined"]
    kappa = f"not defined ({undefined})" if undefined else f"{review['cohens_kappa']:.2f}"
    return [
        "## Human check",
        _table(
            ("", "Person accepts", "Person rejects"),
            [(f"Critic {side}s", *review["table"][f"critic_{side}s"].values()) for side in _SIDES],
        ),
        f"Agreement: {review['agreed']:,} of {review['judged']:,} ({_share(review['agreed'], review['judged'])}), "
        f"Cohen's kappa {kappa}; {review['unsure']} unsure, {review['outdated']} verdicts on earlier texts.",
    ]


def _short(text: str, length: int) -> str:
    """Somebody else's text in one line of printable characters, at most so many."""
    text = visible_text(" ".join(text.split()))
    return text if len(text) <= length else text[: length - 1] + "…"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return markdown_table(header, rows, right=True, padded=True).strip() if rows else "None."


def _shares(title: str, rows: Iterable[tuple[str, int]], total: int, share: str = "Share") -> str:
    return _table((title, "Count", share), [(label, f"{count:,}", _share(count, total)) for label, count in rows])


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.2f} %" if total else "-"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
