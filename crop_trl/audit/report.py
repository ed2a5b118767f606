"""Files of a contamination audit: the candidates for a person to judge, and what follows from the verdicts."""

import csv
import io
from pathlib import Path
from textwrap import shorten

from ..files import read_csv, write_json, write_text
from ..text import filled, joined, markdown_table, word_changes
from .compare import Audit, Pair, summarize

# "same": the same problem, also reworded or with its answer re-encoded. "near": it differs in a condition only.
VERDICTS = ("same", "near", "different")
COLUMNS = (
    *("benchmark", "benchmark_id", "train_id", "field", "similarity", "exact", "answers", "benchmark_answer"),
    *("train_answer", "verdict", "benchmark_text", "train_text"),
)
KEY = COLUMNS[:4]


def read_verdicts(path: str | Path) -> dict[tuple[str, str, str, str], str]:
    """Verdicts by [`Pair.key`], from a `candidates.csv` or what the page saves."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"--verdicts {str(path)!r} does not exist; fill the verdict column of candidates.csv.")
    verdicts: dict[tuple, str] = {}
    for number, row in enumerate(read_csv(path), start=2):
        missing = [name for name in (*KEY, "verdict") if name not in row]
        if missing:
            what = f"--verdicts {str(path)!r} has no column {', '.join(missing)}"
            raise ValueError(f"{what}; fill in candidates.csv itself.")
        verdict, key = (row["verdict"] or "").strip().lower(), tuple(row[name] for name in KEY)
        if verdict and verdict not in VERDICTS:
            raise ValueError(f"{path}, row {number}: verdict {verdict!r} is none of {', '.join(VERDICTS)}.")
        if verdict and verdicts.setdefault(key, verdict) != verdict:
            pair = f"{key[1]!r} and {key[2]!r}, which has {verdicts[key]!r} above"
            raise ValueError(f"{path}, row {number}: verdict {verdict!r} for {pair}; keep one.")
    return verdicts


def apply_verdicts(result: Audit, verdicts: dict[tuple[str, str, str, str], str]) -> None:
    """Write a person's verdicts into the candidates; one on a training text holds for all its copies."""
    result.unknown_verdicts = len(set(verdicts) - {pair.key for pair in result.candidates})
    of_text = {
        (pair.benchmark, pair.problem.id, pair.train.text): verdicts[pair.key]
        for pair in result.candidates
        if pair.key in verdicts
    }
    for pair in result.candidates:
        of_copy = of_text.get((pair.benchmark, pair.problem.id, pair.train.text), "")
        pair.verdict = verdicts.get(pair.key, of_copy)


def write_report(result: Audit, output: str | Path, judged: bool = False) -> str:
    """Write an audit's files, the lists of what overlaps and what is left once it is judged, and return the summary; no
    verdict is dropped."""
    folder = Path(output)
    _check_nothing_is_lost(result, folder / "candidates.csv")
    folder.mkdir(parents=True, exist_ok=True)
    table = summarize(result)
    write_csv(result.candidates, folder / "candidates.csv")
    write_text(folder / "candidates.html", page(result))
    text = summary_markdown(result, judged)
    write_text(folder / "summary.md", text)
    summary = {"records": result.records, "texts": result.texts, "seconds": round(result.seconds, 1), "judged": judged}
    write_json(folder / "summary.json", {**summary, "benchmarks": table})
    if judged:
        write_text(folder / "overlaps.md", overlaps_markdown(result))
        write_json(folder / "clean_ids.json", {name: row["clean_ids"] for name, row in table.items()})
    return text


def _check_nothing_is_lost(result: Audit, path: Path) -> None:
    """Raise `ValueError` when verdicts that a person wrote into the file are not among the candidates' own."""
    if not path.is_file():
        return
    judged = {pair.key for pair in result.candidates if pair.verdict}
    # A misspelt verdict is a person's work too.
    written = [row for row in read_csv(path) if (row.get("verdict") or "").strip()]
    lost = [row for row in written if tuple(row.get(name) for name in KEY) not in judged]
    if lost:
        raise ValueError(
            f"--output {str(path.parent)!r} has a candidates.csv with {len(lost)} verdicts that this run would "
            "drop; give that file as --verdicts, name another folder, or delete it."
        )


def write_csv(candidates: list[Pair], path: Path) -> None:
    """One row per candidate, in the order given."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for pair in candidates:
        answers = (pair.answers, pair.problem.answer or "", pair.train.answer or "", pair.verdict)
        cells = (*pair.key, f"{pair.similarity:.4f}", pair.exact, *answers, pair.problem.text, pair.train.text)
        writer.writerow([cell.replace("\0", "") if isinstance(cell, str) else cell for cell in cells])
    write_text(path, file.getvalue())


def summary_markdown(result: Audit, judged: bool) -> str:
    """The summary table and what it rests on."""
    header = ("Benchmark", "Size", "Exact", "Near duplicate", "Clean size", "Candidates not judged")
    rows = [
        (name, row["size"], row["exact"], row["near"] if judged else "-", row["clean_size"], row["to_judge"])
        for name, row in summarize(result).items()
    ]
    lines = [f"{result.texts} texts of {result.records} training records, compared in {result.seconds:.1f} s."]
    if not judged:
        lines.append("No verdicts yet: clean sizes leave out exact matches only. Judge `candidates.html` or the CSV.")
    if result.unknown_verdicts:
        lines.append(f"{result.unknown_verdicts} verdicts belong to no candidate of this audit and were not used.")
    return "\n".join([markdown_table(header, rows, right=True), *lines]) + "\n"


def overlaps_markdown(result: Audit) -> str:
    """Each problem that leaves the clean set, with the training records that hold it."""
    rows = []
    for benchmark, row in summarize(result).items():
        for kind in ("exact", "near"):
            for id in row[f"{kind}_ids"]:
                found = [p for p in result.candidates if (p.benchmark, p.problem.id) == (benchmark, id)]
                held = [p for p in found if p.verdict in ("same", "near") or (p.exact and p.verdict != "different")]
                records = ", ".join(dict.fromkeys(p.train.id for p in held))
                rows.append((benchmark, id, records, kind, shorten(held[0].problem.text, 80, placeholder=" ...")))
    return markdown_table(("Benchmark", "Problem", "Training records", "Overlap", "It begins"), rows) + "\n"


def page(result: Audit) -> str:
    """All candidates on one page that needs no network: texts side by side, verdicts to choose and to save as a CSV."""
    return filled(
        Path(__file__).parent / "templates" / "candidates.html.j2",
        result=result,
        table=summarize(result),
        verdicts=list(VERDICTS),
        difference=lambda first, second: joined(word_changes(first, second)),
    )
