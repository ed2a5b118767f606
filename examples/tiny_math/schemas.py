"""The world of the word problems: what can be told, asked and computed.

A schema is one kind of story. It owns three ways to tell it (`statements`) and three ways to ask for the result
(`questions`); any statement goes with any question, so a schema has nine surface forms. The conditions of a story are
its *slots*: numbers, and switches (a word that decides the operation, or the category that is asked for). Every slot
stands in exactly one place of every form. That is what makes a counterfactual clean: another value in one slot changes
one span of the text and nothing else.

Statement i and question i use wording i of a switch, so a paraphrase rewords the switches too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

LOWEST, HIGHEST = 1, 150  # every result of a worked step, the answer included, lies in this range


class Step(NamedTuple):
    """One line of arithmetic, and what its result counts."""

    left: int
    op: str
    right: int
    noun: str

    @property
    def result(self) -> int:
        """The value of the step; -1, which is never a valid result, where a division leaves a remainder."""
        if self.op == "+":
            return self.left + self.right
        if self.op == "-":
            return self.left - self.right
        if self.op == "*":
            return self.left * self.right
        return self.left // self.right if self.left % self.right == 0 else -1


class Number(NamedTuple):
    """A numeric slot: its range; and how it is noted, what it counts and when or where."""

    low: int
    high: int
    noun: str
    where: str

    def note(self, value: int) -> str:
        """The condition as an answer notes it: `74 coins at first`; nouns are left to fill in."""
        return f"{value} {self.noun} {self.where}"


class Switch(NamedTuple):
    """A categorical slot: how it is noted, and each option with one wording per statement (or question)."""

    condition_type: str
    where: str
    options: dict[str, tuple[str, str, str]]

    def note(self, value: str) -> str:
        """The condition as an answer notes it: `less after the trade`."""
        word = {"+": "more", "-": "less"}.get(value, value)
        return f"{word} {self.where}"


@dataclass(frozen=True)
class Schema:
    """One kind of story; `steps` turns slot values into the worked solution."""

    name: str
    statements: tuple[str, str, str]
    questions: tuple[str, str, str]
    numbers: dict[str, Number]
    steps: Callable[[dict], list[Step]]
    switches: dict[str, Switch] = field(default_factory=dict)


ROLES = ("baker", "farmer", "teacher", "sailor", "painter", "singer", "child", "doctor", "driver", "keeper")
ITEMS = ("apples", "books", "shells", "stamps", "marbles", "cards")
ITEMS += ("eggs", "candles", "buttons", "flowers", "cups", "pens")
BOXES = ("boxes", "bags", "baskets", "jars", "crates", "trays")
DISTRACTORS = (
    "It is {d} degrees outside.",
    "The road is {d} miles long.",
    "The house is {d} years old.",
    "The clock rings {d} times.",
    "A letter of {d} lines lies there.",
)


def gain_or_loss(where: str, gain: tuple[str, str, str], loss: tuple[str, str, str]) -> Switch:
    """A switch whose options are the operations themselves."""
    return Switch("operation", where, {"+": gain, "-": loss})


def count_questions(thing: str, now: str = "are there now", where: str = "at the end") -> tuple[str, str, str]:
    """The three ways to ask for a final number of something."""
    return (
        f"How many {thing} {now}?",
        f"Find the number of {thing} {where}.",
        f"What is the final count of {thing}?",
    )


def then(before: Step, op: str, right: int, noun: str = "") -> list[Step]:
    """`before`, and a step that goes on from its result."""
    return [before, Step(before.result, op, right, noun or before.noun)]


def _two_moves(v: dict) -> list[Step]:
    return then(Step(v["a"], v["move"], v["b"], v["item"]), v["later"], v["c"])


def _bus(v: dict) -> list[Step]:
    return then(Step(v["a"], v["move"], v["b"], "people"), v["later"], v["c"])


def _share(v: dict) -> list[Step]:
    return then(Step(v["a"], "/", v["k"], v["item"]), v["move"], v["c"])


def _shelves(v: dict) -> list[Step]:
    second = Step(v["a"], v["than"], v["b"], "books")
    return [second] if v["asked"] == "second" else then(second, "+", v["a"])


def _purse(v: dict) -> list[Step]:
    trade = Step(v["n"], "*", v["p"], "coins")
    return [trade, Step(v["a"], v["trade"], trade.result, "coins")]


def _colors(v: dict) -> list[Step]:
    x, y = (v[color] for color in ("red", "blue", "green") if color != v["asked"])
    return [Step(x, "+", y, v["item"])]


def _kinds(v: dict) -> list[Step]:
    price = v["p"] if v["kind"] == "small" else v["q"]
    return then(Step(v["n"], "*", price, "coins"), v["deal"], v["c"])


def _pages(v: dict) -> list[Step]:
    reading = Step(v["d"], "*", v["p"], "pages")
    return [reading, Step(v["t"], v["state"], reading.result, "pages")]


def _growth(v: dict) -> list[Step]:
    op, factor = {"double": ("*", 2), "triple": ("*", 3), "half": ("/", 2)}[v["factor"]]
    return then(Step(v["a"], op, factor, v["item"]), v["move"], v["b"])


def _transfer(v: dict) -> list[Step]:
    op = "+" if v["asked"] == v["target"] else "-"
    return [Step(v[v["asked"]], op, v["c"], v["item"])]


SCHEMAS = (
    Schema(
        "stock",
        (
            "A {who} has {a} {item} and then {move} {b} {item}.",
            "Starting with {a} {item}, a {who} {move} {b} {item}.",
            "A {who} {move} {b} {item} after counting {a} {item}.",
        ),
        count_questions("{item}"),
        {"a": Number(5, 90, "{item}", "at first"), "b": Number(2, 60, "{item}", "later")},
        lambda v: [Step(v["a"], v["move"], v["b"], v["item"])],
        {"move": gain_or_loss("later", ("buys", "finds", "collects"), ("sells", "loses", "drops"))},
    ),
    Schema(
        "two_moves",
        (
            "A {who} has {a} {item}, {move} {b} {item} and later {later} {c} {item}.",
            "From {a} {item}, a {who} first {move} {b} {item} and next {later} {c} {item}.",
            "With {a} {item} at hand, a {who} {move} {b} {item}, then {later} {c} {item}.",
        ),
        count_questions("{item}", now="are left"),
        {
            "a": Number(10, 80, "{item}", "at first"),
            "b": Number(2, 40, "{item}", "next"),
            "c": Number(2, 40, "{item}", "at last"),
        },
        _two_moves,
        {
            "move": gain_or_loss("next", ("buys", "finds", "collects"), ("sells", "loses", "drops")),
            "later": gain_or_loss("at last", ("gets", "picks", "makes"), ("eats", "breaks", "burns")),
        },
    ),
    Schema(
        "boxes",
        (
            "A {who} fills {k} {box} with {n} {item} each and then {move} {c} {item}.",
            "There are {k} {box} with {n} {item} in each, and a {who} {move} {c} {item}.",
            "Each of {k} {box} holds {n} {item}, and the {who} {move} {c} {item}.",
        ),
        count_questions("{item}", where="in total"),
        {
            "k": Number(2, 12, "{box}", "to fill"),
            "n": Number(2, 12, "{item}", "in each"),
            "c": Number(2, 30, "{item}", "after that"),
        },
        lambda v: then(Step(v["k"], "*", v["n"], v["item"]), v["move"], v["c"]),
        {"move": gain_or_loss("after that", ("adds", "brings", "collects"), ("removes", "takes", "drops"))},
    ),
    Schema(
        "share",
        (
            "A {who} shares {a} {item} equally among {k} friends, and each then {move} {c} {item}.",
            "In equal parts {k} friends split {a} {item}, and every one {move} {c} {item}.",
            "Some {a} {item} go to {k} friends equally, and later each {move} {c} {item}.",
        ),
        ("How many {item} has each friend?", "Find the {item} of one friend.", "What does each friend hold now?"),
        {
            "a": Number(12, 120, "{item}", "to share"),
            "k": Number(2, 9, "friends", "to share"),
            "c": Number(1, 12, "{item}", "for each later"),
        },
        _share,
        {"move": gain_or_loss("for each later", ("buys", "finds", "gets"), ("sells", "loses", "eats"))},
    ),
    Schema(
        "shelves",
        (
            "The first shelf holds {a} books. The second shelf holds {b} books {than} than the first.",
            "One shelf has {a} books. Another, the second, has {b} books {than} than that.",
            "With {b} books {than} than the first shelf of {a} books, there is a second shelf.",
        ),
        (
            "How many books are on {asked}?",
            "Find the number of books on {asked}.",
            "What is the count of books for {asked}?",
        ),
        {"a": Number(10, 60, "books", "on the first"), "b": Number(2, 30, "books", "between them")},
        _shelves,
        {
            "than": gain_or_loss("on the second", ("more", "more", "more"), ("less", "less", "less")),
            "asked": Switch(
                "category",
                "asked for",
                {"second": ("the second shelf",) * 3, "both": ("both shelves",) * 3},
            ),
        },
    ),
    Schema(
        "times_as",
        (
            "A {who} owns {a} {item}, and a friend owns {k} times as many.",
            "A friend of a {who} has {k} times the {item} of the {who}, who has {a} {item}.",
            "Against the {a} {item} of a {who}, a friend holds {k} times that.",
        ),
        ("What is {asked} of the two?", "Find {asked} of both counts.", "How big is {asked} of their {item}?"),
        {"a": Number(2, 30, "{item}", "at first"), "k": Number(2, 6, "times", "for the friend")},
        lambda v: then(Step(v["a"], "*", v["k"], v["item"]), v["asked"], v["a"]),
        {"asked": gain_or_loss("asked for", ("the sum",) * 3, ("the difference",) * 3)},
    ),
    Schema(
        "price",
        (
            "A {who} buys {n} tickets at {p} coins each and {deal} {m} coins.",
            "Tickets cost {p} coins each. A {who} takes {n} tickets and {deal} {m} coins.",
            "For {n} tickets of {p} coins each, a {who} pays but {deal} {m} coins.",
        ),
        ("How many coins is that?", "Find the cost in coins.", "What must the {who} pay?"),
        {
            "n": Number(2, 12, "tickets", "to buy"),
            "p": Number(2, 12, "coins", "for each"),
            "m": Number(2, 30, "coins", "beside that"),
        },
        lambda v: then(Step(v["n"], "*", v["p"], "coins"), v["deal"], v["m"]),
        {"deal": gain_or_loss("beside that", ("tips", "adds", "donates"), ("saves", "returns", "keeps"))},
    ),
    Schema(
        "purse",
        (
            "A {who} with {a} coins {trade} {n} {item} for {p} coins each.",
            "There are {a} coins in a purse. The {who} {trade} {n} {item} at {p} coins each.",
            "At {p} coins each, a {who} {trade} {n} {item}, having {a} coins before.",
        ),
        ("How many coins are there now?", "Find the coins at the end.", "What is in the purse?"),
        {
            "a": Number(20, 120, "coins", "at first"),
            "n": Number(2, 10, "{item}", "in the trade"),
            "p": Number(2, 10, "coins", "for each"),
        },
        _purse,
        {"trade": gain_or_loss("after the trade", ("sells", "trades", "delivers"), ("buys", "orders", "gets"))},
    ),
    Schema(
        "colors",
        (
            "A {who} keeps {red} red, {blue} blue and {green} green {item}.",
            "Of the {item}, {green} are green, {red} are red and {blue} are blue.",
            "There are {blue} blue {item}, {green} green ones and {red} red ones.",
        ),
        (
            "How many {item} are not {asked}?",
            "Find the count of {item} without the {asked} ones.",
            "What is left with no {asked} ones?",
        ),
        {color: Number(2, 60, f"{color} {{item}}", "in all") for color in ("red", "blue", "green")},
        _colors,
        {"asked": Switch("category", "left out", {c: (c, c, c) for c in ("red", "blue", "green")})},
    ),
    Schema(
        "kinds",
        (
            "Small {item} cost {p} coins, large ones {q}. A {who} buys {n} {kind} ones and {deal} {c} coins.",
            "At {p} coins for small {item} and {q} for large, a {who} orders {n} {kind} ones and {deal} {c} coins.",
            "A {who} {deal} {c} coins and gets {n} {kind} {item}: small cost {p} coins, large cost {q}.",
        ),
        ("How many coins is that?", "Find the cost in coins.", "What must the {who} pay?"),
        {
            "p": Number(2, 9, "coins", "for small ones"),
            "q": Number(3, 12, "coins", "for large ones"),
            "n": Number(2, 10, "{item}", "to buy"),
            "c": Number(2, 20, "coins", "beside that"),
        },
        _kinds,
        {
            "kind": Switch("category", "to buy", {"small": ("small",) * 3, "large": ("large",) * 3}),
            "deal": gain_or_loss("beside that", ("tips", "adds", "donates"), ("saves", "returns", "keeps")),
        },
    ),
    Schema(
        "pages",
        (
            "A {who} {state} {t} pages. In {d} days the {who} reads {p} pages each day.",
            "Reading {p} pages a day for {d} days, a {who} {state} {t} pages.",
            "A {who} who {state} {t} pages spends {d} days at {p} pages a day.",
        ),
        count_questions("pages", now="is that in the end"),
        {
            "t": Number(20, 120, "pages", "at first"),
            "d": Number(2, 10, "days", "of reading"),
            "p": Number(2, 10, "pages", "a day"),
        },
        _pages,
        {
            "state": gain_or_loss(
                "by reading",
                ("has read", "already read", "has done"),
                ("must read", "still needs", "has ahead"),
            )
        },
    ),
    Schema(
        "ages",
        (
            "A {who} is {a} years old, and the sister is {b} years {than}.",
            "At {a} years of age, a {who} has a sister {b} years {than}.",
            "The sister of a {who} is {b} years {than}, and the {who} is {a} now.",
        ),
        (
            "How old is the sister {c} years {when}?",
            "Find the age of the sister {c} years {when}.",
            "What is her age {c} years {when}?",
        ),
        {
            "a": Number(12, 60, "years", "for the {who}"),
            "b": Number(2, 15, "years", "between them"),
            "c": Number(2, 20, "years", "to look away"),
        },
        lambda v: then(Step(v["a"], v["than"], v["b"], "years"), v["when"], v["c"]),
        {
            "than": gain_or_loss("for the sister", ("older",) * 3, ("younger",) * 3),
            "when": gain_or_loss("at that time", ("later",) * 3, ("ago",) * 3),
        },
    ),
    Schema(
        "growth",
        (
            "The {a} {item} of a {who} become {factor} as many, and then the {who} {move} {b} {item}.",
            "A {who} has {a} {item}, later {factor} as many, and then {move} {b} {item}.",
            "First a {who} turns {a} {item} into {factor} as many, and next {move} {b} {item}.",
        ),
        count_questions("{item}"),
        {"a": Number(4, 48, "{item}", "at first"), "b": Number(2, 30, "{item}", "later")},
        _growth,
        {
            "factor": Switch("operation", "first of all", {f: (f,) * 3 for f in ("double", "triple", "half")}),
            "move": gain_or_loss("later", ("buys", "finds", "collects"), ("sells", "loses", "drops")),
        },
    ),
    Schema(
        "teams",
        (
            "In a hall are {a} people and {b} more {move}. They form teams of {k}.",
            "While {b} people {move}, a hall with {a} people makes teams of {k}.",
            "Teams of {k} are made in a hall of {a} people once {b} people {move}.",
        ),
        ("How many teams are there?", "Find the number of teams.", "What is the count of teams?"),
        {
            "a": Number(12, 90, "people", "at first"),
            "b": Number(2, 40, "people", "later"),
            "k": Number(2, 9, "people", "in a team"),
        },
        lambda v: then(Step(v["a"], v["move"], v["b"], "people"), "/", v["k"], "teams"),
        {"move": gain_or_loss("later", ("come", "arrive", "enter"), ("leave", "go", "exit"))},
    ),
    Schema(
        "transfer",
        (
            "One {who} has {first} {item}, a second has {second}, and {c} {item} go to the {target} one.",
            "To the {target} one go {c} {item}, when one {who} holds {first} {item} and a second {second}.",
            "With {first} {item} for one {who} and {second} for a second, the {target} one takes {c} {item}.",
        ),
        (
            "How many has the {asked} one then?",
            "Find the {item} of the {asked} one.",
            "What does the {asked} one hold now?",
        ),
        {
            "first": Number(5, 70, "{item}", "for the first"),
            "second": Number(5, 70, "{item}", "for the second"),
            "c": Number(2, 40, "{item}", "given away"),
        },
        _transfer,
        {
            "target": Switch("operation", "to receive", {"first": ("first",) * 3, "second": ("second",) * 3}),
            "asked": Switch("category", "asked for", {"first": ("first",) * 3, "second": ("second",) * 3}),
        },
    ),
    Schema(
        "bus",
        (
            "A bus carries {a} people. At one stop {b} people {move} and at the next {c} people {later}.",
            "After {b} people {move} and then {c} people {later}, a bus that had {a} people drives on.",
            "On a bus are {a} people, first {b} people {move}, next {c} people {later}.",
        ),
        count_questions("people"),
        {
            "a": Number(10, 70, "people", "at first"),
            "b": Number(2, 30, "people", "at one stop"),
            "c": Number(2, 30, "people", "at the next"),
        },
        _bus,
        {
            "move": gain_or_loss("at one stop", ("enter", "arrive", "come"), ("leave", "exit", "go")),
            "later": gain_or_loss("at the next", ("join", "join", "join"), ("depart", "depart", "depart")),
        },
    ),
)
