"""How a worked solution is worded: an opening, a lead for every line, a closing with the answer.

These words say nothing about the problem. The teacher learns every phrasing equally often, the student mostly its
favourites, so that the two differ there for a reason that has nothing to do with the problem.
"""

from random import Random

OPENINGS = (
    "Let's work through this one step at a time.",
    "We collect what is given and go on from there.",
    "Here is how this can be worked out.",
    "Okay, let me think about what is asked.",
)
FIRST_LEADS = ("Step 1:", "To begin with:", "First of all:", "We start like this:")
NEXT_LEADS = ("Step {n}:", "After that:", "Next up:", "From this we go on:")
CLOSINGS = (
    "So the final answer is",
    "This leaves us with the answer",
    "Putting it all together we get",
    "The result is",
)

# The student's favourite weighs most; which of the phrasings it is differs from place to place (`turn`).
SKEW = (0.7, 0.15, 0.1, 0.05)


class Wording:
    """One choice of phrasings, so that two solutions can be told in the same words."""

    def __init__(self, rng: Random, skewed: bool = False):
        self._seed, self._skewed = rng.getrandbits(64), skewed

    def tell(self, solution: str, answer: str) -> str:
        """The whole response for the lines of a worked solution."""
        rng = Random(self._seed)
        lines = [self._pick(rng, OPENINGS, 0)]
        for n, line in enumerate(solution.splitlines(), start=1):
            lead = self._pick(rng, FIRST_LEADS, 1) if n == 1 else self._pick(rng, NEXT_LEADS, 2)
            lines.append(f"{lead.format(n=n)} {line}")
        return "\n".join([*lines, f"{self._pick(rng, CLOSINGS, 3)} \\boxed{{{answer}}}."])

    def _pick(self, rng: Random, phrasings: tuple[str, ...], turn: int) -> str:
        if not self._skewed:
            return rng.choice(phrasings)
        return rng.choices(phrasings[turn:] + phrasings[:turn], SKEW)[0]


def generic_share(response: str) -> float:
    """The share of a response's words that belong to the wording rather than to the worked solution."""
    generic = 0
    for line in response.splitlines():
        for phrase in (*OPENINGS, *FIRST_LEADS, *CLOSINGS, "Step", *NEXT_LEADS[1:]):
            if line.startswith(phrase):
                generic += len(phrase.split()) + (phrase == "Step")
                break
    return generic / max(1, len(response.split()))
