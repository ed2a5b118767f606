"""Responses that were sampled and scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..methods import Signals
from ..methods.divergence import topk_entropy
from ..prompts import prompt_texts


@dataclass
class ScoredResponses:
    """
    Responses of the student, and how they were scored: B responses of at most T tokens.

    Args:
        step (`int`):
            Global step at which they were sampled.
        rows (B dataset rows):
            What the prompts came from; the row of several responses stands here once for each.
        prompt_ids, completion_ids (B lists of token ids):
            What was sampled from, and what was sampled.
        loss_mask (`torch.BoolTensor` of shape `[B, T]`):
            Response tokens that may be kept: neither padding nor written by a tool.
        signals ([`~crop_trl.methods.Signals`]):
            Scores by name, `[B, T, K]`.
        tokenizer (`PreTrainedTokenizerBase`):
            Decodes the token ids.
    """

    step: int
    rows: Sequence[Mapping[str, Any]]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    loss_mask: torch.Tensor
    signals: Signals
    tokenizer: Any

    @cached_property
    def texts(self) -> dict[str, list[str]]:
        """Prompts of each kind as the dataset has them, B of each, for reading; see `prompts.prompt_texts`."""
        return prompt_texts(self.rows)

    @cached_property
    def student_entropy(self) -> torch.Tensor | None:
        """Entropy of the student over its K entries, in [0, 1], `[B, T]`; `None` where it was not scored."""
        student = self.signals.get("student/original")
        return None if student is None else topk_entropy(student)
