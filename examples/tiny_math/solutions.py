"""Worked solutions, and the misreadings that make the student weak.

A solution restates the quantities of a step with their nouns, writes the equation and ends in `\\boxed{N}`. Around
that stands boilerplate with several interchangeable phrasings, drawn at random: tokens that say nothing about the
problem. The teacher sees every phrasing equally often, the student mostly its favourites. So on boilerplate the two
models differ for a reason that has nothing to do with the problem; misread numbers and operations carry the errors.
"""

from random import Random

from schemas import HIGHEST, LOWEST, Schema, Step

OPENINGS = ("Let us see.", "We work step by step.", "Here is one way.", "Okay, now think.")
FIRST_LEADS = ("First,", "To begin,", "At first,", "Initially,")
NEXT_LEADS = ("Then", "Next,", "After that,", "Now")
LINKS = (", so", ", that is", ", which gives", ", meaning")
CLOSINGS = ("So the answer is", "Thus we get", "In the end this makes", "Hence the result comes to")
HABITS = ("switch", "forgotten", "number")  # the kinds of misreading; each schema has one as the student's habit
OPERATION_WORDS = {"+": ("plus", "and"), "-": ("minus", "without"), "*": ("times", "by"), "/": ("over", "among")}

# The student's favourite weighs most; which phrasing that is differs from slot to slot (`turn` in `pick`).
SKEW = (0.76, 0.14, 0.06, 0.04)


def pick(rng: Random, phrasings: tuple[str, ...], skewed: bool, turn: int = 0) -> str:
    """One of the phrasings: each equally often, or mostly number `turn`."""
    if not skewed:
        return phrasings[int(rng.random() * len(phrasings))]
    weights = SKEW[: len(phrasings)]
    return rng.choices(phrasings[turn:] + phrasings[:turn], weights)[0]


def same_length_number(rng: Random, number: int) -> int:
    """Another number with as many digits."""
    low, high = (1, 9) if number < 10 else (10, 99) if number < 100 else (100, 199)
    other = rng.randint(low, high - 1)
    return other + (other >= number)


def render_step(step: Step, rng: Random, skewed: bool, lead: str, slip: bool) -> tuple[str, str]:
    """One worked step, twice: as it is, and with one restated quantity or operation replaced (if `slip`)."""
    word = pick(rng, OPERATION_WORDS[step.op], skewed, turn=1)
    link = pick(rng, LINKS, skewed, turn=2)
    equation = f"{link} {step.left} {step.op} {step.right} = {step.result} {step.noun}."

    def restated(left: int, word: str, right: int) -> str:
        # The result of the step before stands right there already: only what comes from the problem is restated.
        first = "" if step.reused == "left" else f" {left} {step.left_noun}"
        second = " this" if step.reused == "right" else f" {right} {step.right_noun}".rstrip()
        return f"{lead}{first} {word}{second}{equation}"

    clean = restated(step.left, word, step.right)
    if not slip:
        return clean, clean
    what = rng.randrange(3)
    if what == 0 and step.reused != "left":
        return clean, restated(same_length_number(rng, step.left), word, step.right)
    if what == 1 and step.reused != "right":
        return clean, restated(step.left, word, same_length_number(rng, step.right))
    other = rng.choice([o for o in OPERATION_WORDS if o != step.op])
    return clean, restated(step.left, rng.choice(OPERATION_WORDS[other]), step.right)


def render_solution(steps: list[Step], rng: Random, skewed: bool = False, slip: bool = False) -> tuple[str, str]:
    """The solution text, and the same text with one slip in a restatement (equal to the first unless `slip`).

    Both have the same number of tokens. The teacher is trained to predict the first while reading the second: its
    equations then follow the problem even where the text before them restated it wrongly.
    """
    slipped_step = rng.randrange(len(steps)) if slip else -1
    parts = [pick(rng, OPENINGS, skewed)]
    slipped = list(parts)
    for i, step in enumerate(steps):
        lead = pick(rng, FIRST_LEADS if i == 0 else NEXT_LEADS, skewed, turn=1 + 2 * (i > 0))
        clean, other = render_step(step, rng, skewed, lead, i == slipped_step)
        parts.append(clean)
        slipped.append(other)
    closing = f"{pick(rng, CLOSINGS, skewed, turn=3)} \\boxed{{{steps[-1].result}}}."
    return " ".join([*parts, closing]), " ".join([*slipped, closing])


def valid(steps: list[Step]) -> bool:
    """Whether every step has an integer result in range."""
    return all(LOWEST <= step.result <= HIGHEST for step in steps)


def misreadings(schema: Schema, values: dict, distractor: int | None) -> dict[str, list[list[Step]]]:
    """By kind, solutions of problems that a careless reader could take this one for; each has another answer."""
    right = schema.steps(values)
    numbers = [values[name] for name in schema.numbers] + ([] if distractor is None else [distractor])
    misread = {
        "switch": [  # another option of a switch
            schema.steps({**values, name: option})
            for name, switch in schema.switches.items()
            for option in switch.options
            if option != values[name]
        ],
        "forgotten": [right[:-1]] if len(right) > 1 else [],  # the last step
        "number": [  # another number of the text
            schema.steps({**values, name: number})
            for name in schema.numbers
            for number in dict.fromkeys(numbers)
            if number != values[name]
        ],
    }
    return {
        kind: [steps for steps in found if valid(steps) and steps[-1].result != right[-1].result]
        for kind, found in misread.items()
    }


def misread_steps(schema: Schema, values: dict, distractor: int | None, habit: str, rng: Random) -> list[Step]:
    """The steps of one misreading (the right ones if there is none).

    Two times in three it is the first of the kind `habit`, if there is one. That makes the student's weakness
    systematic: a habit is as probable as the right reading, so greedy decoding does not cure it.
    """
    found = misreadings(schema, values, distractor)
    everything = [steps for kind in found.values() for steps in kind]
    if found[habit] and rng.random() < 2 / 3:
        return found[habit][0]
    return rng.choice(everything) if everything else schema.steps(values)
