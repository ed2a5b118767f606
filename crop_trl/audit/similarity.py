"""How much texts share: a Tversky index over rare features. A token is a number of 21 bits, a run of three one of 63,
so millions of texts fit in memory."""

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from .words import WORD

BITS = 21  # two million distinct tokens; of more, rare ones share a number
ROWS_AT_A_TIME = 4096
# What a feature that only the training text has costs: little, so that text added to a problem does not hide it.
TRAIN_ONLY = 0.35
# Evidence to be outweighed, so that few shared features mean little.
UNSEEN = 10.0


class Texts:
    """Texts as numbers of their tokens; those that are compared with each other share a vocabulary."""

    def __init__(self, vocabulary: dict[str, int]):
        self.vocabulary = vocabulary
        self.ids, self._ends = array("i"), array("q", [0])

    def add(self, tokens: Sequence[str]) -> None:
        """One more text."""
        known = self.vocabulary
        self.ids.extend(known.setdefault(token, 1 + len(known) % (2**BITS - 1)) for token in tokens)
        self._ends.append(len(self.ids))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def slices(self):
        """Some texts at a time: place of the first, how many, and of each token the text and the number."""
        ids, ends = np.frombuffer(self.ids, np.int32), np.frombuffer(self._ends, np.int64)
        for first in range(0, len(self), ROWS_AT_A_TIME):
            here = ends[first : first + ROWS_AT_A_TIME + 1]
            rows = np.repeat(np.arange(len(here) - 1), np.diff(here))
            yield first, len(here) - 1, rows, ids[here[0] : here[-1]].astype(np.int64)


class _View:
    """One way to compare: which features two sets of texts have, and how rare each is among all of them."""

    def __init__(self, train: Texts, problems: Texts, is_word: np.ndarray, runs: bool, formulas: bool = False):
        self.is_word, self.runs, self.formulas = is_word, runs, formulas
        found, n = np.empty(len(train.ids) + len(problems.ids), np.int64), 0
        for texts in (train, problems):
            for _, _, rows, ids in texts.slices():
                features = self._features(rows, ids)[1]
                found[n : n + len(features)] = features
                n += len(features)
        found = found[:n]
        found.sort()
        again = np.zeros(n + 1, dtype=bool)
        again[1:-1] = found[1:] == found[:-1]
        first, last = np.flatnonzero(~again[:-1] & again[1:]), np.flatnonzero(again[:-1] & ~again[1:])
        self._common = found[first]
        # The last entry is that of features in a single text.
        self._weights = np.log((len(train) + len(problems) + 1) / np.append(last - first + 1, 1))
        parts = [(start + of, what) for start, _, *text in problems.slices() for of, what in [self._features(*text)]]
        columns, features = (np.concatenate(part) for part in zip(*parts))
        self._known, places = np.unique(features, return_inverse=True)
        self._held = torch.zeros(len(self._known), len(problems))
        self._held[places, columns] = torch.from_numpy(self._weigh(features).astype(np.float32))
        self._mass = self._held.sum(dim=0).numpy()

    def _features(self, rows: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Text and number of each feature: tokens or runs of three (a shorter text is one run), each once a text."""
        if self.formulas:
            rows, ids = rows[~self.is_word[ids]], ids[~self.is_word[ids]]
        if self.runs and len(ids):
            padded, of = np.append(ids, [0, 0]), np.append(rows, [-1, -1])
            second, third = (np.where(of[k : len(ids) + k] == rows, padded[k : len(ids) + k], 0) for k in (1, 2))
            whole = (third > 0) | np.append(True, rows[1:] != rows[:-1])
            rows, ids = rows[whole], (ids << 2 * BITS | second << BITS | third)[whole]
        order = np.lexsort((ids, rows))
        rows, ids = rows[order], ids[order]
        once = np.append(True, (rows[1:] != rows[:-1]) | (ids[1:] != ids[:-1]))[: len(ids)]
        return rows[once], ids[once]

    def _weigh(self, features: np.ndarray) -> np.ndarray:
        return self._weights[_place(features, self._common)]

    def similarity(self, count: int, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Of `count` training texts with each problem, `[count, problems]`, in [0, 1]."""
        rows, features = self._features(rows, ids)
        mass = np.bincount(rows, self._weigh(features), count).astype(np.float32)[:, None]
        places = _place(features, self._known)
        held = places < len(self._known)
        if not held.any():
            return np.zeros((count, len(self._mass)), dtype=np.float32)
        places, starts = map(torch.from_numpy, (places[held], np.searchsorted(rows[held], np.arange(count))))
        shared = torch.nn.functional.embedding_bag(places, self._held, starts, mode="sum").numpy()
        return shared / (self._mass + TRAIN_ONLY * (mass - shared) + UNSEEN)


def _place(values: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Where each value stands in a sorted array, its length for those that do not."""
    places = np.searchsorted(among, values)
    inside = places < len(among)
    inside[inside] = among[places[inside]] == values[inside]
    return np.where(inside, places, len(among))


def most_similar(train: Texts, problems: Texts, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places and similarities of the `count` texts most similar to each problem, `[problems, count]`; -1: fewer."""
    places = np.full((len(problems), count), -1)
    best = np.full((len(problems), count), -1, dtype=np.float32)
    if not len(train) or not len(problems):
        return places, best
    is_word = np.zeros(2**BITS, dtype=bool)
    is_word[[number for token, number in train.vocabulary.items() if WORD.match(token)]] = True
    views = (
        (0.5, _View(train, problems, is_word, runs=True)),
        # Rare single tokens: light rewording breaks most runs.
        (0.3, _View(train, problems, is_word, runs=False)),
        # Another language, or other words round the same numbers.
        (0.2, _View(train, problems, is_word, runs=True, formulas=True)),
    )
    for first, *text in train.slices():
        scores = sum(weight * view.similarity(*text) for weight, view in views).T
        for column in np.flatnonzero((scores > best[:, -1:]).any(axis=1)):
            new = np.flatnonzero(scores[column] > best[column, -1])
            values = np.append(best[column], scores[column, new])
            order = np.argsort(-values, kind="stable")[:count]
            best[column], places[column] = values[order], np.append(places[column], first + new)[order]
    return places, best
