"""Worked answers, their wording, and the misreadings that make the student weak.

An answer notes every condition of the problem, calculates, checks the last step backwards and ends in `\\boxed{N}`.
Around and between these parts stands wording: phrases, and whole sentences, that say nothing of the problem. In every
place it has four interchangeable phrasings, of which a model may have a favourite.
"""

from dataclasses import dataclass
from random import Random

from schemas import HIGHEST, LOWEST, Schema, Step

OPENINGS = ("Let us see.", "We start now.", "Here it goes.", "Okay, slowly.")
GIVEN = ("We are told:", "Known are:", "It says:", "Given are:")
NOTE_LEADS = ("", " also", " then", " next")
FIRST_LEADS = ("First we get", "To begin,", "At first,", "Initially this makes")
NEXT_LEADS = ("Then we get", "After that,", "Next,", "Now this makes")
CHECKS = ("To check,", "Looking back,", "Indeed,", "In reverse,")
CLOSINGS = ("So the answer is", "Thus we find", "Hence we have", "In the end it makes")
# A sentence that could stand anywhere; each part is chosen on its own.
FILLER = (
    ("So", "Now", "Well,", "Here"),
    ("we", "I", "you", "they"),
    ("look at", "think about", "go over", "stay with"),
    ("the text", "this part", "it all", "these things"),
    ("with care.", "once more.", "for a while.", "as before."),
)
HABITS = ("switch", "number")  # the kinds of misreading; each schema has one as the student's habit
# How often the favourite of four phrasings is used, and the ones after it.
SHARES = (0.6, 0.2, 0.12, 0.08)
INVERSE = {"+": "-", "-": "+", "*": "/", "/": "*"}


@dataclass(frozen=True)
class Style:
    """How a model words its answers: how many sentences of filler, and which phrasing is its favourite everywhere."""

    fillers: int = 5
    favourite: int = 0

    def pick(self, rng: Random, phrasings: tuple[str, ...]) -> str:
        """One of the phrasings, mostly the favourite."""
        first = self.favourite % len(phrasings)
        return rng.choices(phrasings[first:] + phrasings[:first], SHARES[: len(phrasings)])[0]

    def filler(self, rng: Random) -> str:
        """A sentence that says nothing."""
        return " ".join(self.pick(rng, part) for part in FILLER)


def same_length_number(rng: Random, number: int) -> int:
    """Another number with as many digits."""
    low, high = (1, 9) if number < 10 else (10, 99) if number < 100 else (100, 199)
    other = rng.randint(low, high - 1)
    return other + (other >= number)


def solve(schema: Schema, values: dict, rng: Random, style: Style, slip: bool = False) -> tuple[list[str], list[str]]:
    """
    A worked answer in parts, wording and content in turn: `parts[0::2]` says nothing of the problem. And the same with
    one note misquoted (equal to the first unless `slip`): as many tokens, and all that follows is right.

    The order of the draws is such that another problem of the schema, told with the same draws, is told in the same
    words. `values` holds slots and nouns.
    """
    steps = schema.steps(values)
    closing, check = style.pick(rng, CLOSINGS), style.pick(rng, CHECKS)
    wording = [style.pick(rng, OPENINGS)], [style.pick(rng, GIVEN)]
    slots = schema.numbers | schema.switches
    note_leads = [style.pick(rng, NOTE_LEADS) for _ in slots]
    # Fillers stand anywhere between the parts: before the notes, after them, and after each step.
    places = [[] for _ in range(2 + len(steps))]
    for _ in range(style.fillers):
        places[int(rng.random() * len(places))].append(style.filler(rng))
    leads = [style.pick(rng, NEXT_LEADS if i else FIRST_LEADS) for i in range(len(steps))]

    def notes(read: dict) -> str:
        told = [f"{lead} {slot.note(read[name])}" for lead, (name, slot) in zip(note_leads, slots.items())]
        return ",".join(told).format(**values) + "."

    parts = [" ".join([*wording[0], *places[0], *wording[1]]), notes(values)]
    for i, step in enumerate(steps):
        parts.append(" " + " ".join([*places[1 + i], leads[i]]))
        parts.append(f" {step.left} {step.op} {step.right} = {step.result} {step.noun}.")
    last = steps[-1]
    parts.append(" " + " ".join([*places[-1], check]))
    parts.append(f" {last.result} {INVERSE[last.op]} {last.right} = {last.left}.")
    parts += [f" {closing}", f" \\boxed{{{last.result}}}."]
    if not slip:
        return parts, parts
    name = rng.choice(list(slots))
    if name in schema.numbers:
        other = same_length_number(rng, values[name])
    else:
        other = rng.choice([option for option in schema.switches[name].options if option != values[name]])
    return parts, [parts[0], notes({**values, name: other}), *parts[2:]]


def valid(steps: list[Step]) -> bool:
    """Whether every step has an integer result in range."""
    return all(LOWEST <= step.result <= HIGHEST for step in steps)


def misreadings(schema: Schema, values: dict, distractor: int | None) -> dict[str, list[dict]]:
    """By kind, what a careless reader could take the values for; each has another answer."""
    right = schema.steps(values)
    numbers = [values[name] for name in schema.numbers] + ([] if distractor is None else [distractor])
    misread = {
        "switch": [  # another option of a switch
            {**values, name: option}
            for name, switch in schema.switches.items()
            for option in switch.options
            if option != values[name]
        ],
        "number": [  # another number of the text
            {**values, name: number}
            for name in schema.numbers
            for number in dict.fromkeys(numbers)
            if number != values[name]
        ],
    }

    def wrong(steps: list[Step]) -> bool:
        return valid(steps) and steps[-1].result != right[-1].result

    return {kind: [read for read in found if wrong(schema.steps(read))] for kind, found in misread.items()}


def misread(schema: Schema, values: dict, distractor: int | None, habit: str, rng: Random) -> dict:
    """The values of one misreading (the right ones if there is none).

    Two times in three it is the first of the kind `habit`, if there is one. That makes the student's weakness
    systematic: a habit is as probable as the right reading, so greedy decoding does not cure it.
    """
    found = misreadings(schema, values, distractor)
    everything = [read for kind in found.values() for read in kind]
    if found[habit] and rng.random() < 2 / 3:
        return found[habit][0]
    return rng.choice(everything) if everything else values
