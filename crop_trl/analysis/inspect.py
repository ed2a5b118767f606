"""Look at what is chosen in one response: by a trainer now, or in a bank or an export."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..evaluation.grading import grade
from ..methods import get_method
from ..prompts import REWORDINGS, needs_negatives, prompt_text, prompt_variants
from ..text import token_pieces
from .bank import bank_of
from .dependence import first_wrong_places
from .heatmap import GAP, MARGIN, SEMANTIC, SURFACE, ResponseHeatmap
from .tokens import TokenTable

# Methods that a picture of one response sets beside the run's own.
COMPARED = ("random", "entropy", "tip")


def inspect_response(trainer, *rows: Mapping[str, Any]) -> ResponseHeatmap:
    """Sample one response to each row, score it, and show one of them: the first wrong one, else the first. Marked are
    what the trainer's method keeps and what others would, whether the answer is right (of a row with an `answer`), and
    where it goes wrong (with a `solution`, if right answers read like theirs). Every process has to call it. The values
    are the method's own, or those of `crop` where it ranks no tokens and the rows hold triplets. A method that needs a
    batch shows what `crop` would keep, and the note says so."""
    trained = method = trainer.args.method
    if needs_negatives(get_method(trained).needs):
        method = "crop" if get_method(trained).score else "opd"
    triplet = not trainer.prompt_maker and all(prompt_variants(row, kind) for row in rows for kind in REWORDINGS)
    names = dict.fromkeys([method, *(["crop"] if triplet else []), *COMPARED])
    needs = dict.fromkeys(need for name in names for need in get_method(name).needs)
    sampled = trainer.sample(rows, list(needs), num_generations=1)
    bank = bank_of(sampled)
    table = TokenTable.from_bank(bank, names, trainer.args.selection_settings)
    pieces = [token_pieces(sampled.tokenizer, ids) for ids in sampled.completion_ids]
    right = [_is_right(row, ids, sampled.tokenizer) for row, ids in zip(rows, sampled.completion_ids)]
    place = right.index(False) if False in right else 0
    shown = "crop" if triplet and method not in table.scores else method
    heatmap = table_heatmap(table, sampled.tokenizer, place, shown)
    here = table.span(place)
    rows_shown = {k: values for k, values in heatmap.rows.items() if not triplet or k not in (SEMANTIC, SURFACE)}
    return replace(
        heatmap,
        rows={GAP: np.where(table.trainable[here], bank.gap(method)[place, : len(heatmap)], np.nan), **rows_shown},
        kept=table.kept[method][here],
        kept_by={name: table.kept[name][here] for name in names},
        note=_note(table, place, method, shown) + ("" if method == trained else f" The run used {trained!r}."),
        **_verdict(rows, right, place, pieces),
    )


def _is_right(row: Mapping[str, Any], ids: list[int], tokenizer) -> bool | None:
    """Whether a response is right; `None` where the row does not say what is."""
    answer = row.get("answer")
    return None if answer is None else grade(tokenizer.decode(ids, skip_special_tokens=True), answer)


def _verdict(rows: Sequence[Mapping[str, Any]], right: list[bool | None], place: int, pieces: list[list[str]]) -> dict:
    """What the picture says of right and wrong, of the response at `place`."""
    answer, verdict = rows[place].get("answer"), right[place]
    if verdict is None:
        return {}
    if verdict:
        return {"verdict": f"The answer is right: {answer}."}
    problems, solutions = [prompt_text(row["prompt"]) for row in rows], [row.get("solution") for row in rows]
    wrong = first_wrong_places(problems, solutions, pieces, right)[place]
    marked = "" if wrong is None else " Marked is the first number or sign that is not that of a right answer."
    return {"verdict": f"The answer is wrong; {answer} would be right.{marked}", "wrong_from": wrong}


def _note(table: TokenTable, response: int, method: str, shown: str) -> str:
    """What the frames say of a method, and what the rows, of perhaps another, say of several counterfactuals."""
    here = table.span(response)
    step = "" if table.steps is None else f", after step {table.steps[response]}"
    share = table.kept[method][here].sum() / max(table.trainable[here].sum(), 1)
    note = f"Framed: the {share:.0%} of this response that method {method!r} keeps{step}."
    several = table.settings.get("counterfactuals", 1)
    if several > 1 and "semantic_divergence" in table.measures.get(shown, {}):
        of_all = "largest" if shown == "crop-max" else "mean"
        note += f" What a condition moves is the {of_all} over up to {several} counterfactuals."
    return note


def strongest_response(table: TokenTable, method: str) -> int:
    """The response in which a method's score peaks highest; the first without scores."""
    if method not in table.scores or not len(table):
        return 0
    return int(table.responses[np.where(table.trainable, table.scores[method], -np.inf).argmax()])


def table_heatmap(
    table: TokenTable, tokenizer, response: int | None = None, method: str | None = None, note: str = ""
) -> ResponseHeatmap:
    """The heat map of one response, by default that in which the method's score peaks highest."""
    method = next(iter(table.kept)) if method is None else method
    if response is None:
        response = strongest_response(table, method)
    here = table.span(response)
    measured = {name: values[here] for name, values in table.measures.get(method, {}).items()}
    rows = {}
    semantic, surface = measured.pop("semantic_divergence", None), measured.pop("surface_divergence", None)
    if semantic is not None and surface is not None:
        rows = {SEMANTIC: semantic, SURFACE: surface, MARGIN: semantic.astype(float) - surface}
    rows.update({name.replace("_", " ").capitalize(): values for name, values in measured.items()})
    if method in table.scores:
        score = table.scores[method][here]
        # Half precision in an export: its steps are 1/2048 of a number. Where the score is the margin, it is shown
        # itself: a difference of two rounded numbers would order near-ties in another way than the choice did.
        is_margin = MARGIN in rows and np.allclose(score, rows[MARGIN], rtol=2e-3, atol=5e-4)
        rows[MARGIN if is_margin else f"Score: what {method} ranks tokens by"] = score
    if not rows:
        raise ValueError(f"Method {method!r} keeps every token and measures nothing; there is no heat map of it.")
    # What a tool wrote is no choice of the student's.
    rows = {label: np.where(table.trainable[here], values, np.nan) for label, values in rows.items()}
    return ResponseHeatmap(
        token_pieces(tokenizer, table.token_ids[here].tolist()),
        rows,
        table.kept[method][here],
        table.rows[response]["prompts"],
        note=f"{_note(table, response, method, method)} {note}".strip(),
        scorer="student" if method.endswith("-student") else "teacher",
    )
