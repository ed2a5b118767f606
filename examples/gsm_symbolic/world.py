"""World G: grade-school word problems with exact paraphrases and counterfactuals.

    python examples/gsm_symbolic/world.py --split train --n 1024 --output train.jsonl

A problem is a template of `reasoning-gym` (see templates.py) with a value for each of its names.

* A *paraphrase* is the same problem in our own words (see rewordings.py).
* A *counterfactual* is the same problem with one condition changed: one number, or one word that decides the answer.
  The two texts differ in exactly one place, and so do the answers.
* A *change of surface* gives another name or another object, and leaves every number as it is.

By hash of their numbers, a tenth of the problems belong to `validation` and a tenth to `test`. They never occur in
training, not even as a counterfactual.
"""

import argparse
import difflib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, partial
from hashlib import blake2b
from itertools import chain, count
from random import Random

from rewordings import REWORDINGS
from templates import NUMBER, Written, equations, load, numbers, tidy
from wording import Wording

SPLITS = ("train", "validation", "test")
# Two names that say the same thing: "5 grandchildren" are "quintuplets".
COUPLED = {(38, "count"), (38, "child_type")}
DIGITS = 3  # of a number, zeros at its end not counted: more is hard for a model of this size
_ODD = re.compile(r"\d\.\d{3}|(?<![\w)])-\d|\b0\b(?!\.)|\de[-+]?\d")  # rounded, negative, zero
_TOKEN = re.compile(rf"{NUMBER}|\w+|[^\w\s]")


@dataclass(frozen=True)
class Problem:
    """One word problem. Everything else (text, solution, answer) follows from template and values."""

    number: int
    values: dict

    @cached_property
    def written(self) -> Written | None:
        return load()[self.number].write(self.values)

    @property
    def text(self) -> str:
        return self.written.question

    @property
    def answer(self) -> str:
        return self.written.answer

    @cached_property
    def sound(self) -> bool:
        """Whether all equations are true, the last one gives the answer, and no number is out of place."""
        if self.written is None or not self.answer.isdigit() or int(self.answer) == 0:
            return False
        text = f"{self.text} {self.written.solution}"
        if _ODD.search(text) or any(len(re.sub("[.,]", "", n).strip("0")) > DIGITS for n in numbers(text)):
            return False
        sides = [pair for pair in equations(self.written.solution) if None not in pair]
        answer = int(self.answer)
        return (
            bool(sides)
            and all(left == right > 0 for left, right in sides)
            and sides[-1][1] in (answer, Fraction(answer, 100))  # some ask for a percentage
        )

    @property
    def split(self) -> str:
        """The split to which the hash of template and numbers assigns this problem."""
        key = f"{self.number} {numbers(self.text)}".encode()
        bucket = int.from_bytes(blake2b(key, digest_size=4).digest(), "big") % 10
        return {0: "test", 1: "validation"}.get(bucket, "train")

    @property
    def paraphrase(self) -> str:
        return tidy(REWORDINGS[self.number].format(**self.values))

    def with_value(self, name: str, value) -> "Problem":
        return replace(self, values={**self.values, name: value})


@cache
def pool(number: int) -> dict[str, list]:
    """The values that each name of a template takes in its own draws."""
    rng, template = Random(f"pool {number}"), load()[number]
    drawn = [template.draw(rng) for _ in range(300)]
    found = {}
    for name in template.names:
        values = list(dict.fromkeys(values[name] for values in drawn))
        found[name] = sorted(values) if all(isinstance(v, (int, float)) for v in values) else values
    return found


def other_values(problem: Problem, name: str, rng: Random) -> list:
    """Other values for one name, in random order: those of the template's own draws first, then those between them."""
    own, values = problem.values[name], pool(problem.number)[name]
    drawn = [value for value in values if value != own]
    rng.shuffle(drawn)
    between = []
    if type(own) is int:
        low, high = (min(values), min(max(values), min(values) + 2000)) if len(values) > 1 else (2, 5)
        between = [v for v in range(low, high + 1) if v != own and v not in values]
        between = rng.sample(between, min(len(between), 60))
    return drawn + between


def changes(before: str, after: str) -> list[tuple[tuple[int, int], str]]:
    """The spans of `before` that read otherwise in `after`, each with what stands there."""
    old, new = list(_TOKEN.finditer(before)), list(_TOKEN.finditer(after))
    x, y = [m.group() for m in old], [m.group() for m in new]
    if len(x) == len(y) and all(a == b or (a[0].isdigit() and b[0].isdigit()) for a, b in zip(x, y)):
        return [((m.start(), m.end()), b) for m, a, b in zip(old, x, y) if a != b]
    found = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, x, y, autojunk=False).get_opcodes():
        if tag != "equal":
            start = old[i].start() if i < len(old) else len(before)
            there = after[new[k].start() : new[m - 1].end()] if m > k else ""
            found.append(((start, old[j - 1].end() if j > i else start), there))
    return found


def edits(problem: Problem, name: str, rng: Random) -> Iterator[tuple[Problem, tuple[int, int], str]]:
    """This problem with other values for one name where that changes one place of the text: problem, span, new text."""
    if (problem.number, name) in COUPLED:
        return
    for value in other_values(problem, name, rng):
        other = problem.with_value(name, value)
        if other.written is None:
            continue
        places = changes(problem.text, other.text)
        if len(places) != 1:
            return  # the name stands nowhere, or in several places
        span, new = places[0]
        if len(problem.text[slice(*span)].split()) <= 3 and len(new.split()) <= 3:
            yield other, span, new


def counterfactual(problem: Problem, name: str, rng: Random) -> tuple[Problem, tuple[int, int], str] | None:
    """The first sound edit of one name that changes the answer; `None` if there is none."""
    for other, span, new in edits(problem, name, rng):
        if other.answer == problem.answer and not _has_number(problem.values[name]):
            return None  # a name or an object
        allowed = other.split == "train" or problem.split != "train"
        if other.answer != problem.answer and allowed and other.sound:
            return other, span, new
    return None


def _has_number(value) -> bool:
    return bool(re.search(r"\d", str(value)))


def conditions(problem: Problem, told: Wording, rng: Random) -> list[dict]:
    """Every condition of a problem: where it stands, and which spans of the worked solution change with it.

    Numbers that do not matter are conditions too, with no span in the solution. The spans are those that differ from
    the solutions for up to three other values, told in the same words.
    """
    solution = told.tell(problem.written.solution, problem.answer)
    found = []
    for name in load()[problem.number].names:
        place, spans, decides = None, set(), _has_number(problem.values[name])
        sound, tried = [], []
        for edit in _first(edits(problem, name, rng), 30):
            tried.append(edit)
            sound += [edit] if edit[0].sound else []
            if len(sound) == 3:
                break
        for other, span, _ in sound or tried[:3]:
            place = span
            decides = decides or other.answer != problem.answer
            differing = changes(solution, told.tell(other.written.solution, other.answer))
            spans.update((start, end) for (start, end), _ in differing if start < end)
        if place is not None and decides:
            value = problem.text[slice(*place)]
            found.append(
                {"name": name, "value": value, "span": list(place), "solution_spans": sorted(map(list, spans))}
            )
    return found


def changed_problems(problem: Problem, told: Wording) -> list[dict]:
    """The problem with one of its values changed, up to three times for each, and the solutions in the same words.

    Unlike `conditions`, values that stand in several places count too, as a fraction does with its two numbers.
    """
    rng, found = Random(problem.text), []
    for name in load()[problem.number].names:
        others = [problem.with_value(name, value) for value in other_values(problem, name, rng)[:30]]
        others = [other for other in others if other.written and other.text != problem.text]
        if _has_number(problem.values[name]) or any(other.answer != problem.answer for other in others):
            for other in sorted(others, key=lambda other: not other.sound)[:3]:
                solution = told.tell(other.written.solution, other.answer)
                found.append({"condition": name, "problem": other.text, "solution": solution, "answer": other.answer})
    return found


def _first(items: Iterator, n: int) -> Iterator:
    for _, item in zip(range(n), items):
        yield item


def change_surface(problem: Problem, rng: Random) -> Problem | None:
    """The same problem about somebody or something else; numbers, solution steps and answer stay."""
    names = [name for name in load()[problem.number].names if isinstance(problem.values[name], str)]
    for name in rng.sample(names, len(names)):
        for value in other_values(problem, name, rng):
            other = problem.with_value(name, value)
            same = other.written and numbers(other.text) == numbers(problem.text) and other.text != problem.text
            if same and numbers(other.written.solution) == numbers(problem.written.solution):
                if other.answer == problem.answer and value not in problem.values.values():
                    return other
    return None


def misread(problem: Problem, rng: Random) -> Problem:
    """The problem as a hasty reader takes it: one number of the text in the place of another.

    Each template has its own order in which such slips are tried, so that they are a habit and no noise. Where none
    gives a sound solution, one number becomes a neighbour of itself.
    """
    habit = Random(f"habit {problem.number}")
    names = [n for n, v in problem.values.items() if type(v) is int and (problem.number, n) not in COUPLED]
    pairs = [(name, other) for name in names for other in names if problem.values[name] != problem.values[other]]
    near = [(name, problem.values[name] + step) for name in names for step in (1, -1, 2, -2, 10, -10)]
    tries = [(name, problem.values[other]) for name, other in habit.sample(pairs, len(pairs))]
    for name, value in tries + rng.sample(near, len(near)):
        other = problem.with_value(name, value)
        if value > 0 and other.sound and other.answer != problem.answer and len(changes(problem.text, other.text)) == 1:
            return other
    return problem


def sample(rng: Random, split: str) -> Problem:
    """Draw one problem of a split: a template, then values for it; another template where that takes too long."""
    while True:
        number = rng.choice(list(REWORDINGS))
        for _ in range(300):
            problem = Problem(number, load()[number].draw(rng))
            if problem.written and problem.split == split and problem.sound:
                return problem


def training_example(rng: Random, skewed: bool = False, misread_share: float = 0.0) -> tuple[str, str]:
    """Problem text and response for training a model; every second problem is told in our own words."""
    problem = sample(rng, "train")
    text = problem.text if rng.random() < 0.5 else problem.paraphrase
    understood = misread(problem, rng) if rng.random() < misread_share else problem
    return text, Wording(rng, skewed).tell(understood.written.solution, understood.answer)


def make_record(
    problem: Problem, rng: Random, identifier: str, alternates: int = 3, with_changes: bool = False
) -> dict | None:
    """The triplet record of a problem, with more counterfactuals of other conditions; `None` if it has not even one.

    `with_changes` adds `changes`: every value changed, with the worked solutions, for `crop-trl selectors`.
    """
    told = Wording(rng)
    listed = conditions(problem, told, rng)
    made = []
    for condition in rng.sample(listed, len(listed)):
        edit = counterfactual(problem, condition["name"], rng)
        if edit is None:
            continue
        other, span, new = edit
        made.append(
            {
                "condition_type": "number" if _has_number(condition["value"]) else "category",
                "condition": condition["name"],
                "counterfactual_problem": other.text,
                "counterfactual_span": [span[0], span[0] + len(new)],
                "counterfactual_description": f"{condition['value']} becomes {new}",
                "counterfactual_answer": other.answer,
            }
        )
        if len(made) > alternates:
            break
    if not made:
        return None
    surface = change_surface(problem, rng)
    return {
        "id": identifier,
        "template": str(problem.number),
        "original_problem": problem.text,
        "paraphrase_problem": problem.paraphrase,
        "surface_problem": surface.text if surface else None,
        **made[0],
        "answer": problem.answer,
        "solution": told.tell(problem.written.solution, problem.answer),
        "status": "strict_pass",
        "critic": {"by": "template"},
        "triplet_complete": True,
        "usable_for_training": True,
        "validation_passed": True,
        "alternates": made[1:],
        "conditions": listed,
        **({"changes": changed_problems(problem, told)} if with_changes else {}),
    }


def _draw(number: int, split: str, seed: int, alternates: int, with_changes: bool) -> dict | None:
    rng = Random(f"{split} {seed} {number}")
    return make_record(sample(rng, split), rng, f"gsm-{split}-{seed}-{number}", alternates, with_changes)


def generate(
    split: str,
    seed: int = 0,
    alternates: int = 3,
    with_changes: bool = False,
    apply: Callable = map,
    part: int = 256,
) -> Iterator[dict]:
    """Endless distinct records of a split; `apply` may be a pool's `imap`, which takes all that it is given: a part."""
    seen = set()
    draw = partial(_draw, split=split, seed=seed, alternates=alternates, with_changes=with_changes)
    for record in chain.from_iterable(apply(draw, range(start, start + part)) for start in count(0, part)):
        if record is not None and record["original_problem"] not in seen:
            seen.add(record["original_problem"])
            yield record


def write_records(path, split: str, n: int, **how) -> None:
    """Write the first `n` records of a split, one JSON object a line; `how` goes to `generate`."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for record in _first(generate(split, part=min(n, 256), **how), n):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write word problems as triplet records, one JSON object a line.")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--n", type=int, default=1024, help="number of records")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alternates", type=int, default=3, help="further counterfactuals per record, at most")
    parser.add_argument("--changes", action="store_true", help="add what `crop-trl selectors` makes labels from")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    how = {"seed": args.seed, "alternates": args.alternates, "with_changes": args.changes}
    write_records(args.output, args.split, args.n, **how)


if __name__ == "__main__":
    main()
