"""Files of a contamination audit: the candidates for a person to judge, and what follows from the verdicts."""

import csv
import difflib
import html
import io
import json
import re
from pathlib import Path

from ..files import write_text
from .compare import Audit, Candidate, summarize

# "same": the same problem, also reworded or with its answer re-encoded. "near": it differs in a condition only.
VERDICTS = ("same", "near", "different")
LONGEST_CELL = 2**31 - 1  # a candidate's text may be longer than csv's default of 128 KiB
COLUMNS = (
    "benchmark",
    "benchmark_id",
    "train_id",
    "field",
    "similarity",
    "exact",
    "answers",
    "benchmark_answer",
    "train_answer",
    "verdict",
    "benchmark_text",
    "train_text",
)


def read_verdicts(path: str | Path) -> dict[tuple[str, str, str, str], str]:
    """
    Verdicts from a `candidates.csv` with its `verdict` column filled, or from what the page saves.

    Args:
        path (`str` or `Path`): The CSV file.

    Returns:
        `dict`: (benchmark, benchmark_id, train_id, field) to verdict; rows without one are left out.

    Raises:
        `FileNotFoundError`, `ValueError`: no such file; a column is missing; a word that is no verdict.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"--verdicts {str(path)!r} does not exist; fill the verdict column of candidates.csv.")
    try:
        return _verdicts(path)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"--verdicts {str(path)!r} is no CSV file in UTF-8 ({error}); save it as one.") from None


def _verdicts(path: str | Path) -> dict[tuple[str, str, str, str], str]:
    csv.field_size_limit(LONGEST_CELL)
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        needed = (*COLUMNS[:4], "verdict")
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(
                f"--verdicts {str(path)!r} has no column {', '.join(missing)}; it needs {', '.join(needed)}, "
                "separated by commas."
            )
        verdicts = {}
        for number, row in enumerate(reader, start=2):
            verdict = (row["verdict"] or "").strip().lower()
            if verdict and verdict not in VERDICTS:
                raise ValueError(f"{path}, line {number}: verdict {verdict!r} is none of {', '.join(VERDICTS)}.")
            key = tuple(row[name] for name in COLUMNS[:4])
            if verdict and verdicts.setdefault(key, verdict) != verdict:
                raise ValueError(
                    f"{path}, line {number}: verdict {verdict!r} for {key[1]!r} and {key[2]!r}, which has "
                    f"{verdicts[key]!r} above; keep one."
                )
    return verdicts


def apply_verdicts(result: Audit, verdicts: dict[tuple[str, str, str, str], str]) -> None:
    """
    Write a person's verdicts into the candidates. A verdict on one of several copies of a training text holds for all.

    Args:
        result ([`Audit`]): Changed in place; `unknown_verdicts` counts those that belong to no candidate.
        verdicts (`dict`): See [`read_verdicts`].
    """
    keys = {candidate.key for candidate in result.candidates}
    result.unknown_verdicts = len(set(verdicts) - keys)
    texts = {
        (candidate.benchmark, candidate.problem.id, candidate.train.text): verdicts[candidate.key]
        for candidate in result.candidates
        if candidate.key in verdicts
    }
    for candidate in result.candidates:
        copy = texts.get((candidate.benchmark, candidate.problem.id, candidate.train.text), "")
        candidate.verdict = verdicts.get(candidate.key, copy)


def write_report(result: Audit, output: str | Path, judged: bool = False) -> dict:
    """
    Write `candidates.csv`, `candidates.html`, `summary.md` and `summary.json`; with verdicts also `clean_ids.json`.

    Args:
        result ([`Audit`]): What was found.
        output (`str` or `Path`): Folder, made if needed.
        judged (`bool`, *optional*, defaults to `False`): Whether a person's verdicts were applied.

    Returns:
        `dict`: The summary table; see [`summarize`].

    Raises:
        `ValueError`: the `candidates.csv` that is there holds verdicts that the new one would not.
    """
    folder = Path(output)
    _check_nothing_is_lost(result, folder / "candidates.csv")
    folder.mkdir(parents=True, exist_ok=True)
    table = summarize(result)
    write_csv(result.candidates, folder / "candidates.csv")
    write_text(folder / "candidates.html", page(result))
    write_text(folder / "summary.md", summary_markdown(result, judged))
    summary = {"records": result.records, "texts": result.texts, "seconds": round(result.seconds, 1), "judged": judged}
    write_text(folder / "summary.json", json.dumps({**summary, "benchmarks": table}, indent=1))
    if judged:
        clean = {name: row["clean_ids"] for name, row in table.items()}
        write_text(folder / "clean_ids.json", json.dumps(clean, indent=1))
    return table


def _check_nothing_is_lost(result: Audit, path: Path) -> None:
    """Raise `ValueError` when verdicts that a person wrote into the file are not among the candidates' own."""
    if not path.is_file():
        return
    judged = {candidate.key for candidate in result.candidates if candidate.verdict}
    csv.field_size_limit(LONGEST_CELL)
    # Read leniently: a misspelt verdict, or one saved in another encoding, is a person's work too.
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        rows = [row for row in csv.DictReader(file) if (row.get("verdict") or "").strip()]
    lost = [row for row in rows if tuple(row.get(name) for name in COLUMNS[:4]) not in judged]
    if lost:
        raise ValueError(
            f"--output {str(path.parent)!r} has a candidates.csv with {len(lost)} verdicts that this run would "
            "drop; give that file as --verdicts, name another folder, or delete it."
        )


def write_csv(candidates: list[Candidate], path: Path) -> None:
    """One row per candidate, in the order given."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for c in candidates:
        answers = (c.answers, c.problem.answer or "", c.train.answer or "", c.verdict)
        cells = (*c.key, f"{c.similarity:.4f}", c.exact, *answers, c.problem.text, c.train.text)
        writer.writerow([cell.replace("\0", "") if isinstance(cell, str) else cell for cell in cells])
    write_text(path, file.getvalue())


def summary_markdown(result: Audit, judged: bool) -> str:
    """The summary table and what it rests on."""
    lines = [
        "| Benchmark | Size | Exact | Near duplicate | Clean size | Candidates not judged |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in summarize(result).items():
        near = row["near"] if judged else "-"
        lines.append(f"| {name} | {row['size']} | {row['exact']} | {near} | {row['clean_size']} | {row['to_judge']} |")
    lines.append("")
    lines.append(f"{result.texts} texts of {result.records} training records, compared in {result.seconds:.1f} s.")
    if not judged:
        lines.append("No verdicts yet: clean sizes leave out exact matches only. Judge `candidates.html` or the CSV.")
    if result.unknown_verdicts:
        lines.append(f"{result.unknown_verdicts} verdicts belong to no candidate of this audit and were not used.")
    return "\n".join(lines) + "\n"


# A long problem has 500; the comparison takes quadratic time where pieces repeat.
MAX_PIECES = 4000


def marked_difference(first: str, second: str) -> tuple[str, str]:
    """
    Two texts as HTML, what only one of them has wrapped in `<del>` and `<ins>`.

    Args:
        first, second (`str`): The texts.

    Returns:
        `tuple[str, str]`: Unmarked where the texts are too long to be compared piece by piece.
    """
    pieces = [re.findall(r"\s+|\\[a-zA-Z]+|\w+|.", text, re.DOTALL) for text in (first, second)]
    if max(map(len, pieces)) > MAX_PIECES:
        return html.escape(first), html.escape(second)
    words = [[piece if piece.strip() else " " for piece in part] for part in pieces]
    out: tuple[list[str], list[str]] = ([], [])
    for tag, a, b, c, d in difflib.SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        for side, (start, end), mark in ((0, (a, b), "del"), (1, (c, d), "ins")):
            text = html.escape("".join(pieces[side][start:end]))
            if text:
                out[side].append(text if tag == "equal" or not text.strip() else f"<{mark}>{text}</{mark}>")
    return "".join(out[0]), "".join(out[1])


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #1c2330; }
table { border-collapse: collapse; } td, th { padding: .2em .9em; text-align: right; border-bottom: 1px solid #d8dee8; }
td:first-child, th:first-child { text-align: left; }
article { border: 1px solid #d8dee8; border-radius: 6px; margin: 1em 0; padding: .7em 1em; }
article.exact { border-left: 5px solid #b3261e; }
header { display: flex; gap: 1.2em; align-items: baseline; flex-wrap: wrap; } header select { margin-left: auto; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1.2em; }
.pair div { white-space: pre-wrap; overflow-wrap: anywhere; } .answer { color: #52607a; }
del { background: #ffdad6; text-decoration: none; } ins { background: #cdeccf; text-decoration: none; }
"""
SCRIPT = """
document.getElementById("save").onclick = () => {
  const quote = text => '"' + text.replaceAll('"', '""') + '"';
  const rows = [["benchmark", "benchmark_id", "train_id", "field", "verdict"]];
  for (const box of document.querySelectorAll("select"))
    rows.push([...JSON.parse(box.dataset.key), box.value]);
  const file = new Blob([rows.map(row => row.map(quote).join(",")).join("\\n") + "\\n"], { type: "text/csv" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = "verdicts.csv";
  link.click();
};
"""


def page(result: Audit) -> str:
    """
    All candidates on one page that needs nothing from the network: texts side by side, a verdict to choose, a button
    that saves the verdicts as a CSV file for `--verdicts`.
    """
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Contamination audit</title>",
        f"<style>{STYLE}</style><h1>Contamination audit</h1>",
        f"<p>{result.texts} texts of {result.records} training records. Exact matches come first, then candidates by "
        "similarity. <b>same</b>: the same problem, also reworded or asking for its answer in another form; "
        "<b>near</b>: it differs in a condition only; <b>different</b>: no overlap. "
        "<button id=save>Save verdicts</button></p>",
        "<table><tr><th>Benchmark<th>Size<th>Exact<th>Near<th>Clean size<th>To judge</tr>",
    ]
    table = summarize(result)
    for name, row in table.items():
        cells = "".join(f"<td>{row[key]}" for key in ("size", "exact", "near", "clean_size", "to_judge"))
        parts.append(f"<tr><td>{html.escape(name)}{cells}</tr>")
    parts.append("</table>")
    for name in table:
        parts.append(f"<h2>{html.escape(name)}</h2>")
        parts += [_card(candidate) for candidate in result.candidates if candidate.benchmark == name]
    parts.append(f"<script>{SCRIPT}</script></html>")
    return "\n".join(parts)


def _card(candidate: Candidate) -> str:
    left, right = marked_difference(candidate.problem.text, candidate.train.text)
    key = html.escape(json.dumps(candidate.key), quote=True)
    options = "".join(
        f"<option{' selected' if verdict == candidate.verdict else ''}>{verdict}" for verdict in ("", *VERDICTS)
    )
    similarity = "exact" if candidate.exact else f"{candidate.similarity:.3f}"
    answers = [html.escape(answer or "-") for answer in (candidate.problem.answer, candidate.train.answer)]
    relation = f"<span>answers: {candidate.answers}</span>" if candidate.answers else ""
    return (
        f"<article class={'exact' if candidate.exact else 'near'}><header><b>{html.escape(candidate.problem.id)}</b>"
        f"<span>{html.escape(candidate.train.id)} ({html.escape(candidate.train.field)})</span>"
        f"<span>{similarity}</span>"
        f'{relation}<select data-key="{key}" aria-label=verdict>{options}</select></header>'
        f"<div class=pair><div>{left}</div><div>{right}</div>"
        f"<div class=answer>Answer: {answers[0]}</div><div class=answer>Answer: {answers[1]}</div></div></article>"
    )
