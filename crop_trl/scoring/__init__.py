"""Scoring a fixed response: top-K log-probabilities from a model here or elsewhere."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ..methods.context import TopKLogprobs


@runtime_checkable
class Scorer(Protocol):
    """Anything that scores fixed responses: token ids in, aligned top-K log-probabilities out.

    A scorer may also say what the check before training asks of a teacher: `ends`, the ids that end a response for it;
    `precision`, the type of its weights; `remedy`, what to do when its scores depend on what else is in a batch; and
    `stats`, with `metrics()` and `reset()`, to be logged."""

    def score(self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]) -> TopKLogprobs:
        """See [`~crop_trl.scoring.local.LocalScorer.score`]."""
        ...
