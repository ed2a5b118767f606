"""From a rollout bank or a run's export to one HTML file. Nothing is scored here: methods have done that, and the page
only draws the line between kept and dropped tokens anew."""

import base64
import gzip
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis.bank import RolloutBank
from ..analysis.categories import CATEGORIES, categorize
from ..analysis.dependence import AFTER_ERROR, Reference, first_wrong_places, problem_of
from ..analysis.selector_bench import record_of_each
from ..analysis.tokens import TokenTable
from ..evaluation.grading import grade
from ..files import write_text
from ..formulas import with_formulas
from ..methods import SelectionSettings, Signals, get_method
from ..prompts import NEGATIVE, ORIGINAL, REWORDINGS, STUDENT, split_signal
from ..text import filled, marked, marked_triplet, masked, token_pieces, visible_text, visible_token
from ..training.cards import in_words, public_name
from ..training.export import exported_steps

TEMPLATE = Path(__file__).parent / "page.html"
RESPONSES = 512  # that a page holds unless told otherwise
# Entries shown of a prediction: the most of these of which the page has no more than so many. Very unlikely ones are
# left out, but for the first.
_ENTRIES, _ROOM, _UNLIKELY = (16, 10, 5), 900_000, np.log(1e-2)
_NO_LOGPROB = 65535
_HEADINGS = (
    (ORIGINAL, "Original problem"),
    ("paraphrase", "Paraphrase: the same problem in other words"),
    ("counterfactual", "Counterfactual: one condition changed"),
)
# Kinds of tokens, and what methods measure, in plain words.
_KINDS = {
    "task-specific": "numbers and maths",
    "formatting": "punctuation, layout",
    "boilerplate": "stock phrases",
    "function": "words like “the”",
    "content": "other words",
}
_MEASURES = {
    "student_entropy": "how unsure the student was",
    "teacher_entropy": "how unsure the teacher was",
    "forward_kl": "how far the student is from the teacher",
    "overlap_mass": "how much of what the teacher expects the student expects too",
    "semantic_divergence": "how far a changed condition moves the prediction",
    "surface_divergence": "how far a paraphrase moves the prediction",
}
_FROZEN = (
    "This is the mask that was trained. The run kept its scores in half precision, in which near-ties look equal, so "
    "no other budget can be shown; a rollout bank (crop-trl replay) has them in full."
)

Records = Sequence[Mapping[str, Any]]


def bank_page(
    bank: RolloutBank,
    tokenizer,
    settings: SelectionSettings | None = None,
    records: Records | None = None,
    template: str = "{problem}",
    title: str = "What every method would train",
    responses: int = RESPONSES,
    method: str | None = None,
) -> str:
    """
    The page of a rollout bank, with every method that chooses and that it has signals for.

    Args:
        bank ([`~crop_trl.analysis.bank.RolloutBank`]): Responses and signals.
        tokenizer: The student's.
        settings ([`~crop_trl.methods.SelectionSettings`], *optional*): The budget to begin with, and all else.
        records (sequence of mappings, *optional*):
            Records of the problems, with the `answer`, `solution` or `changes` that the bank does not hold.
        template (`str`): The wrapper round the problems, by which records are found.
        title (`str`): Heading of the page.
        responses (`int`): How many the page holds, from the first on; methods see all of them.
        method (`str`, *optional*): The one to begin with, whose target gaps are measured to; by default `crop`.

    Returns:
        `str`: HTML.

    Raises:
        `ValueError`: a response to a problem of which there is no record.
    """
    settings = settings or SelectionSettings()
    own = [method] if method in bank.runnable_methods() else []
    names = list(dict.fromkeys([*own, *bank.choosing_methods()]))
    table = TokenTable.from_bank(bank, names, settings)
    # What a method with a rule of its own may keep of each response, whatever the budget.
    ruled, whole = [name for name in names if get_method(name).keep], replace(settings, retention_ratio=1.0)
    shown = min(responses, len(table.lengths))
    signals = Signals({name: [p.rows(slice(shown)) for p in parts] for name, parts in bank.signals.lists.items()})
    first = np.arange(len(table.lengths)) < shown
    eligible = TokenTable.from_bank(bank, ruled, whole).only(first).kept
    begin = method if own else "crop" if "crop" in names else names[0]
    return _page(table.only(first), tokenizer, settings, records, template, title, begin, signals, eligible)


def exported_table(folder: str | Path, responses: int = RESPONSES) -> TokenTable:
    """What a run exported; of more steps than so many responses allow, some, from the first to the last."""
    steps = exported_steps(folder)
    in_a_step = len(TokenTable.from_run(folder, steps[:1] or None).lengths)
    room = max(2, responses // max(1, in_a_step))
    places = np.unique(np.linspace(0, len(steps) - 1, min(room, len(steps))).round().astype(int))
    table = TokenTable.from_run(folder, [steps[place] for place in places])
    _, first, size = np.unique(table.steps, return_index=True, return_counts=True)
    number = np.arange(len(table.steps)) - np.repeat(first, size)  # of a response within its step
    return table.only(number < max(1, responses // len(places)))


def run_page(
    table: TokenTable,
    tokenizer,
    records: Records | None = None,
    template: str = "{problem}",
    title: str = "What a run trained",
) -> str:
    """The page of what a run exported, for its own method alone; see [`bank_page`]."""
    known = ("retention_ratio", "min_tokens")
    settings = SelectionSettings(**{name: table.settings[name] for name in known if name in table.settings})
    return _page(table, tokenizer, settings, records, template, title, next(iter(table.kept)))


def save_page(page: str, path: str | Path) -> None:
    """Write a page, whole or not at all; folders are made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)


def _page(table, tokenizer, settings, records, template, title, begin, signals=None, eligible=None) -> str:
    facts, arrays = _gather(table, tokenizer, settings, records, template, signals)
    facts["method"] = begin
    facts["target"] = get_method(begin).target if signals else None
    arrays |= {f"eligible {name}": values for name, values in (eligible or {}).items()}
    return filled(TEMPLATE, title=visible_text(title), packed=_packed(facts, arrays))


def _gather(table, tokenizer, settings, records, template, signals) -> tuple[dict, dict[str, np.ndarray]]:
    """What the page knows: facts, and arrays of one element a token, response after response."""
    rows, ids = table.rows, [table.token_ids[table.span(n)].tolist() for n in range(len(table.lengths))]
    if records:
        originals = [row["prompts"][ORIGINAL][0] for row in rows]
        rows = [{**row, **record} for row, record in zip(rows, record_of_each(originals, records, template))]
    raw = [token_pieces(tokenizer, one) for one in ids]
    answers = [None if row.get("answer") is None else str(row["answer"]) for row in rows]
    texts = [tokenizer.decode(one, skip_special_tokens=True) for one in ids]
    right = [None if answer is None else grade(text, answer) for text, answer in zip(texts, answers)]
    labels, wrong = _truth(rows, raw, right)
    pieces: dict[str, int] = {}
    places = [pieces.setdefault(visible_token(piece), len(pieces)) for part in raw for piece in part]
    problems: dict[str, int] = {}
    numbers = [problems.setdefault(json.dumps([r["prompts"], a]), len(problems)) for r, a in zip(rows, answers)]
    arrays = {
        "piece": np.array(places, dtype=np.int64),
        "trainable": table.trainable,
        "category": np.concatenate([categorize(part) for part in raw]),
        **({} if labels is None else {"label": labels}),
        **({} if table.entropy is None else {"entropy": table.entropy}),
        **{f"score {name}": values for name, values in table.scores.items()},
        **({f"kept {name}": values for name, values in table.kept.items()} if signals is None else {}),
    }
    measures = _measures(table, arrays)
    readings, entries, vocabulary = _predictions(signals, table, tokenizer) if signals else ([], {}, [])
    each = zip(table.lengths.tolist(), numbers, right, wrong, table.steps.tolist())
    facts = {
        "about": [
            [key.replace("_", " "), visible_text(str(public_name(value)))]
            for key, value in masked(table.settings).items()
            if value not in (None, "", {})
        ],
        "methods": [{"name": name, "says": _says(name)} for name in table.kept],
        "budget": f"{100 * settings.retention_ratio:.10g}",
        "minTokens": settings.min_tokens,
        "frozen": "" if signals else _FROZEN,
        "measures": list(measures),
        "readings": readings,
        "pieces": list(pieces),
        "vocabulary": vocabulary,
        "categories": [_KINDS[kind] for kind in CATEGORIES],
        "problems": [_problem(*json.loads(problem)) for problem in problems],
        "answers": [dict(zip(("length", "problem", "right", "wrong", "step"), answer)) for answer in each],
    }
    return facts, {**arrays, **{f"measure {name}": value for name, value in measures.items()}, **entries}


def _says(name: str) -> str:
    """What a method keeps, in a line: its own words, without the formula that follows them after a colon."""
    try:
        method = get_method(name)
    except ValueError:  # a run's own method, whose file is elsewhere
        return ""
    parts = [in_words(function).split(": ")[0].rstrip(".") for function in (method.keep, method.score) if function]
    return visible_text("; ".join(parts).replace("`", "") or "Every token")


def _truth(rows, pieces, right) -> tuple[np.ndarray | None, list[int | None]]:
    """What each token depends on (`analysis.dependence`), and where wrong responses go wrong; `None`: not known."""
    if not all(row.get("changes") for row in rows):
        return None, first_wrong_places(
            [row["prompts"][ORIGINAL][0] for row in rows], [row.get("solution") for row in rows], pieces, right
        )
    references, labels, wrong = {}, [], []
    for row, part, verdict in zip(rows, pieces, right):
        problem = problem_of(row)
        references[problem] = references.get(problem) or Reference.of(row)
        labels.append(references[problem].label_tokens(part))
        after = np.flatnonzero(labels[-1] == AFTER_ERROR)
        wrong.append(int(after[0]) if after.size and verdict is False else None)
    return np.concatenate(labels), wrong


def _measures(table: TokenTable, known: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What methods measured on the way to their scores, unless it is here already; four digits are enough to read."""
    found: dict[str, np.ndarray] = {}
    for method, measures in table.measures.items():
        for name, value in measures.items():
            if not any(np.array_equal(value, other) for other in (*known.values(), *found.values())):
                found[f"{_MEASURES.get(name, name.replace('_', ' '))} ({method})"] = value.astype(np.float32)
    return {name: (value.view(np.uint32) & 0xFFFFF000).view(np.float32) for name, value in found.items()}


def _problem(prompts: Mapping[str, Sequence[str]], answer: str | None) -> dict[str, Any]:
    """A problem beside each of its counterfactuals: kinds, headings, and texts in pieces of `with_formulas`."""
    original, paraphrases = prompts[ORIGINAL][0], prompts.get("paraphrase", [])
    others = [
        (kind, f"{kind.capitalize()} prompt", marked(original, text))
        for kind, texts in prompts.items()
        if kind not in (ORIGINAL, *REWORDINGS)
        for text in texts
    ]
    views = []
    for changed in prompts.get("counterfactual") or [None]:
        _, texts = marked_triplet(original, paraphrases, changed)
        headings = [_HEADINGS[0], *[_HEADINGS[1]] * len(paraphrases), _HEADINGS[2]]
        blocks = [(*heading, text) for heading, text in zip(headings, texts)]
        views.append([(kind, heading, with_formulas(text)) for kind, heading, text in blocks + others])
    return {"views": views, "answer": None if answer is None else visible_text(answer)}


def _predictions(signals: Signals, table, tokenizer) -> tuple[list, dict[str, np.ndarray], list[str]]:
    """
    Who read the responses after what; for each token and reading the log-probability of the token (thousandths of a nat
    below zero) and the likeliest entries, token after token; and the texts of those entries.
    """
    # The two whose gap is trained come first.
    kinds = (ORIGINAL, *REWORDINGS)

    def place(name: str) -> tuple:
        reader, kind = split_signal(name)
        return kind != ORIGINAL, reader == STUDENT, kinds.index(kind) if kind in kinds else len(kinds), name

    readings, own, counts, listed = [], [], [], []
    for name in sorted((name for name in signals if split_signal(name)[1] != NEGATIVE), key=place):
        reader, kind = split_signal(name)
        parts = signals.lists[name]
        for m, part in enumerate(parts):
            readings.append({"name": name, "reader": reader, "kind": kind + (f" {m + 1}" if len(parts) > 1 else "")})
            real = np.arange(part.sampled_logprobs.size(1))[None] < table.lengths[:, None]
            valid = np.ones(int(real.sum()), dtype=bool) if part.mask is None else part.mask.numpy()[real]
            below = np.nan_to_num(-1000 * part.sampled_logprobs.double().numpy()[real], nan=np.inf)
            own.append(np.where(valid, below.round().clip(0, _NO_LOGPROB - 1), _NO_LOGPROB).astype(np.uint16))
            logprobs = part.logprobs.double().numpy()[real]
            likely = logprobs >= _UNLIKELY
            likely[:, 0] = True
            counts.append(likely.sum(1) * valid)
            # A byte, finest near certainty.
            rooted = 255 * np.sqrt((logprobs / _UNLIKELY).clip(0, 1))
            listed.append((part.token_ids.numpy()[real].astype(np.int32), rooted.round().astype(np.uint8)))
    counts = np.stack(counts, axis=1)
    counts = counts.clip(max=next((k for k in _ENTRIES if counts.clip(max=k).sum() <= _ROOM), _ENTRIES[-1]))
    shape = (*counts.shape, int(counts.max(initial=0)))
    ids, roots = np.zeros(shape, np.int32), np.zeros(shape, np.uint8)
    for n, (some, theirs) in enumerate(listed):
        ids[:, n, : some.shape[1]], roots[:, n, : some.shape[1]] = some[:, : shape[2]], theirs[:, : shape[2]]
    chosen = np.arange(shape[2]) < counts[..., None]
    known, places = np.unique(ids[chosen], return_inverse=True)
    # Which entry the token itself is; one that no reading lists is none of them.
    written = np.searchsorted(known, table.token_ids)
    written[~np.isin(table.token_ids, known)] = len(known)
    arrays = {"written": written, "own": np.stack(own, 1), "entries": counts, "entry": places, "root": roots[chosen]}
    return readings, arrays, _entry_texts(tokenizer, known.tolist())


def _entry_texts(tokenizer, ids: Sequence[int]) -> list[str]:
    """Texts of single vocabulary entries: the second of two in a row, since a first may lose its leading space."""
    once, twice = (tokenizer.batch_decode([[i] * times for i in ids], skip_special_tokens=False) for times in (1, 2))
    names = tokenizer.convert_ids_to_tokens(list(ids))
    return [
        visible_text(name or f"#{i}") if not both[len(one) :] or "\ufffd" in both else visible_token(both[len(one) :])
        for i, name, one, both in zip(ids, names, once, twice)
    ]


def _packed(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """
    All of it as base64 of gzip: the length of the facts, the facts as JSON, then the arrays, of each number the lowest
    byte of all elements first, since bytes of one significance compress better together.
    """
    layout, parts = [], []
    for name, array in arrays.items():
        array = np.ascontiguousarray(array).ravel()
        if array.dtype.kind != "f":
            lowest = np.uint8 if not array.size or array.min() >= 0 else np.int8
            array = array.astype(np.promote_types(lowest, np.min_scalar_type(array.max(initial=0))))
        array = array.astype(array.dtype.newbyteorder("<"))
        layout.append([name, f"{array.dtype.kind}{array.dtype.itemsize}", len(array)])
        parts.append(array.view(np.uint8).reshape(-1, array.dtype.itemsize).T.tobytes())
    head = json.dumps({**facts, "arrays": layout}).encode()
    return base64.b64encode(gzip.compress(b"".join([struct.pack("<I", len(head)), head, *parts]), 6, mtime=0)).decode()
