"""Responses that were sampled and scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..methods import Signals
from ..methods.divergence import topk_entropy
from ..prompts import first_prompts, row_for_reading


@dataclass
class ScoredResponses:
    """Responses of the student, and how they were scored: B responses of at most T tokens."""

    step: int  # global, at which they were sampled
    rows: Sequence[Mapping[str, Any]]  # what the prompts came from, once for each response
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    loss_mask: torch.Tensor  # bool, [B, T]: what may be kept, neither padding nor written by a tool
    signals: Signals  # [B, T, K]
    tokenizer: Any
    rewards: Mapping[str, torch.Tensor] = field(default_factory=dict, kw_only=True)  # by their function, [B]
    advantages: torch.Tensor | None = field(default=None, kw_only=True)  # what GRPO makes of them, [B]

    @cached_property
    def said(self) -> list[dict[str, Any]]:
        """What each row says as texts, see `prompts.row_for_reading`."""
        return [row_for_reading(row) for row in self.rows]

    @property
    def texts(self) -> dict[str, list[str]]:
        """Prompts of each kind as the dataset has them, B of each, for reading; see `prompts.first_prompts`."""
        return first_prompts(self.said)

    @cached_property
    def student_entropy(self) -> torch.Tensor | None:
        """Entropy of the student over its K entries, in [0, 1], `[B, T]`; `None` where it was not scored."""
        student = self.signals.get("student/original")
        return None if student is None else topk_entropy(student)
