"""Word problems with paraphrases and counterfactuals that are right by construction.

    python examples/tiny_math/problems.py --split train --n 1024 --seed 0 --output train.jsonl

A problem is a schema (see schemas.py), a value for each of its slots, a choice of nouns, a surface form, and in half of
the cases a distractor sentence with a number that does not matter.

* A *paraphrase* is the same problem in another form: other statement, other question, distractor moved.
* A *counterfactual* is the same problem, in the same form, with one slot changed so that the answer changes.

Two things are held out from training. By hash, about a tenth of all (schema, slot values): these problems are never
seen, not even as a counterfactual. And of the nine surface forms of each schema, three: a statement and a question that
each occur in training never occur there together.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from hashlib import blake2b
from itertools import count
from pathlib import Path
from random import Random

from schemas import BOXES, DISTRACTORS, ITEMS, ROLES, SCHEMAS, Number, Schema, Step
from solutions import HABITS, Style, misread, solve, valid

SPLITS = ("train", "heldout")
FORMS = [(statement, question) for statement in range(3) for question in range(3)]
HELD_OUT_SHARE = 10  # one in so many (schema, values) is held out


@cache
def forms_of(schema_index: int, held_out: bool) -> list[tuple[int, int]]:
    """The surface forms of a schema that are (or are not) held out; each statement and question is in both lists."""
    return [form for form in FORMS if ((sum(form) + schema_index) % 3 == 0) == held_out]


def unlike(form: tuple[int, int], forms: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The forms that share neither statement nor question with `form`."""
    return [other for other in forms if other[0] != form[0] and other[1] != form[1]]


@dataclass(frozen=True)
class Problem:
    """One word problem. Everything else (text, steps, answer) follows from these fields."""

    schema_index: int
    values: dict[str, int | str]
    nouns: dict[str, str]
    form: tuple[int, int]
    distractor: tuple[int, int, bool] | None  # which sentence, its number, whether it opens the text

    @property
    def schema(self) -> Schema:
        return SCHEMAS[self.schema_index]

    @cached_property
    def steps(self) -> list[Step]:
        """The worked steps."""
        return self.schema.steps(self.nouns | self.values)

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    @cached_property
    def text(self) -> str:
        """The problem as the reader sees it."""
        parts = [self._fill(part, variant) for part, variant in zip(self._parts(), self.form)]
        if self.distractor:
            sentence, number, first = self.distractor
            parts.insert(0 if first else 1, DISTRACTORS[sentence].format(d=number))
        return " ".join(parts)

    def solution(self, rng: Random, fillers: int = Style.fillers) -> str:
        """A worked answer, in the teacher's style."""
        return "".join(solve(self.schema, self.nouns | self.values, rng, Style(fillers))[0])

    @property
    def held_out(self) -> bool:
        """Whether the hash of schema and values puts this problem into the held-out split."""
        key = f"{self.schema.name} {sorted(self.values.items())}"
        return int.from_bytes(blake2b(key.encode(), digest_size=4).digest(), "big") % HELD_OUT_SHARE == 0

    def wording(self, slot: str, value: int | str | None = None) -> str:
        """How a slot's value (by default its own) reads in this form: digits, or the words of a switch."""
        value = self.values[slot] if value is None else value
        if slot in self.schema.numbers:
            return str(value)
        in_statement = f"{{{slot}}}" in self.schema.statements[self.form[0]]
        return self.schema.switches[slot].options[value][self.form[0 if in_statement else 1]]

    def paraphrase(self, rng: Random) -> "Problem":
        """The same problem in a training form that shares neither statement nor question with this one."""
        form = rng.choice(unlike(self.form, forms_of(self.schema_index, held_out=False)))
        distractor = self.distractor and (*self.distractor[:2], not self.distractor[2])
        return replace(self, form=form, distractor=distractor)

    def counterfactual(self, slot: str, rng: Random, allow_held_out: bool) -> "Problem | None":
        """This problem with another value in one slot and another answer; None if no value does."""
        options = slot_range(self.schema_index, slot)
        for value in rng.sample(options, len(options)):
            if value != self.values[slot]:
                other = replace(self, values={**self.values, slot: value})
                if valid(other.steps) and other.answer != self.answer and (allow_held_out or not other.held_out):
                    return other
        return None

    def _parts(self) -> tuple[str, str]:
        return self.schema.statements[self.form[0]], self.schema.questions[self.form[1]]

    def _fill(self, template: str, variant: int) -> str:
        switches = {n: s.options[self.values[n]][variant] for n, s in self.schema.switches.items()}
        return template.format(**self.nouns, **{**self.values, **switches})


@cache
def slot_range(schema_index: int, slot: str) -> list[int | str]:
    """All values that a slot can take."""
    schema = SCHEMAS[schema_index]
    if slot in schema.numbers:
        number: Number = schema.numbers[slot]
        return list(range(number.low, number.high + 1))
    return list(schema.switches[slot].options)


def sample_problem(rng: Random, split: str, held_out_form: bool = False) -> Problem:
    """Draw one problem of a split; drawing goes on until the values are valid and fall into the split."""
    index = int(rng.random() * len(SCHEMAS))
    schema = SCHEMAS[index]
    nouns = {"who": rng.choice(ROLES), "item": rng.choice(ITEMS), "box": rng.choice(BOXES)}
    form = rng.choice(forms_of(index, held_out_form))
    distractor = None
    if rng.random() < 0.5:
        distractor = (rng.randrange(len(DISTRACTORS)), rng.randint(2, 60), rng.random() < 0.5)
    while True:
        values = {slot: rng.choice(slot_range(index, slot)) for slot in (*schema.numbers, *schema.switches)}
        problem = Problem(index, values, nouns, form, distractor)
        if valid(problem.steps) and problem.held_out == (split == "heldout"):
            return problem


def training_example(
    rng: Random, style: Style, misread_share: float = 0.0, slip_share: float = 0.0
) -> tuple[str, str, str]:
    """(problem text, answer to predict, answer to read) for training one of the two models.

    For `misread_share` of the problems the answer is that of a misreading. For `slip_share` the answer to read has one
    slip in it (see solutions.solve).
    """
    problem = sample_problem(rng, "train")
    schema, values = problem.schema, problem.nouns | problem.values
    if rng.random() < misread_share:
        number = problem.distractor[1] if problem.distractor else None
        values = misread(schema, values, number, HABITS[problem.schema_index % len(HABITS)], rng)
    clean, slipped = solve(schema, values, rng, style, slip=rng.random() < slip_share)
    return problem.text, "".join(clean), "".join(slipped)


def describe(problem: Problem, slot: str) -> str:
    """One condition in words."""
    part = problem.schema.numbers.get(slot) or problem.schema.switches[slot]
    return part.note(problem.values[slot]).format(**problem.nouns)


def edit_fields(problem: Problem, paraphrase: Problem, slot: str, edited: Problem) -> dict:
    """The fields of a record that belong to one counterfactual."""
    schema = problem.schema
    after = describe(edited, slot)
    return {
        "condition_type": "number" if slot in schema.numbers else schema.switches[slot].condition_type,
        "original_condition_description": describe(problem, slot),
        "paraphrased_condition_description": describe(paraphrase, slot),
        "counterfactual_problem": edited.text,
        "counterfactual_condition_description": after,
        "counterfactual_description": f"{problem.wording(slot)} becomes {edited.wording(slot)}",
        "counterfactual_answer": str(edited.answer),
    }


def comparable(problem: Problem) -> dict:
    """The answer, and the problem with one slot changed with its answer in the same words, three times for each slot.

    They have no sentences of filler, which would stand elsewhere where there is another number of steps. Where no other
    value of a slot is valid, the numbers are out of range, which labels do not mind.
    """
    found, rng = [], Random(problem.text)
    for slot in (*problem.schema.numbers, *problem.schema.switches):
        values = [value for value in slot_range(problem.schema_index, slot) if value != problem.values[slot]]
        others = [replace(problem, values={**problem.values, slot: value}) for value in rng.sample(values, len(values))]
        sound = [other for other in others if valid(other.steps)]
        for other in (sound or others)[:3]:
            told = other.solution(Random(problem.text), fillers=0)
            found.append({"condition": slot, "problem": other.text, "solution": told, "answer": str(other.answer)})
    return {"solution": problem.solution(Random(problem.text), fillers=0), "changes": found}


def make_record(
    problem: Problem, rng: Random, identifier: str, alternates: int = 3, with_changes: bool = False
) -> dict | None:
    """The triplet record of a problem, with more counterfactuals on other slots; None if it has not even one.

    `with_changes` adds `changes`: every slot changed, with the worked answers, for `crop-trl selectors`.
    """
    paraphrase = problem.paraphrase(rng)
    solution = problem.solution(rng)
    slots = [*problem.schema.numbers, *problem.schema.switches]
    edits = []
    for slot in rng.sample(slots, len(slots)):
        edited = problem.counterfactual(slot, rng, allow_held_out=problem.held_out)
        if edited is not None:
            edits.append(edit_fields(problem, paraphrase, slot, edited))
        if len(edits) > alternates:
            break
    if not edits:
        return None
    shared = ("original_condition_description", "paraphrased_condition_description")
    statement, question = problem.form
    return {
        "id": identifier,
        "template": f"{problem.schema.name}/{statement}{question}",
        "original_problem": problem.text,
        "paraphrase_problem": paraphrase.text,
        **edits[0],
        "answer": str(problem.answer),
        "solution": solution,
        "status": "strict_pass",
        "critic": {"by": "template"},
        "triplet_complete": True,
        "usable_for_training": True,
        "validation_passed": True,
        "alternates": [{k: v for k, v in edit.items() if k not in shared} for edit in edits[1:]],
        **(comparable(problem) if with_changes else {}),
    }


def generate(split: str, seed: int, alternates: int = 3, with_changes: bool = False) -> Iterator[dict]:
    """Endless distinct records of a split. Every other held-out problem is told in a held-out form.

    Each draw has a random stream of its own, so `alternates` does not change which problems come.
    """
    seen = set()
    for draw in count():
        rng = Random(f"{split} {seed} {draw}")
        problem = sample_problem(rng, split, held_out_form=split == "heldout" and len(seen) % 2 == 1)
        record = make_record(problem, rng, f"tiny-{split}-{seed}-{len(seen)}", alternates, with_changes)
        if record is not None and problem.text not in seen:
            seen.add(problem.text)
            yield record


def main() -> None:
    parser = argparse.ArgumentParser(description="Write word problems as triplet records, one JSON object a line.")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--n", type=int, default=1024, help="number of records")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alternates", type=int, default=3, help="further counterfactuals per record, at most")
    parser.add_argument("--changes", action="store_true", help="add what `crop-trl selectors` makes labels from")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    records = generate(args.split, args.seed, args.alternates, args.changes)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    with open(args.output, "w", encoding="utf-8", newline="\n") as file:
        for _ in range(args.n):
            file.write(json.dumps(next(records)) + "\n")


if __name__ == "__main__":
    main()
