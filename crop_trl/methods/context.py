"""What methods are given. Shapes: B responses, T response positions (right-padded), K returned vocabulary entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Gather = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class TopKLogprobs:
    """
    The K most likely vocabulary entries at each response position, and the log-probability of the response token.

    Log-probabilities are natural, in fp32, of the softmax over every row of the output head, and not renormalised over
    K. Positions outside `mask` hold zeros.

    Args:
        token_ids (`torch.Tensor` of shape `[B, T, K]`): Vocabulary ids, most likely first.
        logprobs (`torch.Tensor` of shape `[B, T, K]`): Their log-probabilities, falling.
        sampled_logprobs (`torch.Tensor` of shape `[B, T]`): Log-probability of the response token, in K or not.
        mask (`torch.BoolTensor` of shape `[B, T]`, *optional*): Valid positions; `None` means all.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    sampled_logprobs: torch.Tensor
    mask: torch.Tensor | None = None

    @property
    def top_k(self) -> int:
        """Number of returned entries, K."""
        return self.token_ids.size(-1)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TopKLogprobs:
        return TopKLogprobs(**{name: None if value is None else change(value) for name, value in vars(self).items()})

    def rows(self, index) -> TopKLogprobs:
        """The same for a subset of the responses; `index` is anything that indexes the first dimension."""
        return self._each(lambda value: value[index])

    def to(self, device) -> TopKLogprobs:
        """The same on another device."""
        return self._each(lambda value: value.to(device))


class Signals(Mapping[str, TopKLogprobs]):
    """
    The same responses, scored by several models and after several prompts.

    A name is `scorer/kind`: who read the responses, after which kind of prompt. `signals["teacher/original"]` are the
    scores after the only prompt of a kind; `signals.variants("teacher/counterfactual")` are those after each, where a
    dataset row may hold several.

    Args:
        signals (mapping): Name -> [`TopKLogprobs`] or a list of them, `[B, T, K]` each; a row with fewer prompts of a
            kind than others has an invalid `mask` in the later ones.

    Raises:
        `ValueError`: a signal that there is not, or `signals[name]` of a kind with several prompts.
    """

    def __init__(self, signals: Mapping[str, TopKLogprobs | Sequence[TopKLogprobs]]):
        several = signals.lists if isinstance(signals, Signals) else signals
        self.lists: dict[str, list[TopKLogprobs]] = {
            name: list(value) if isinstance(value, (list, tuple)) else [value] for name, value in several.items()
        }

    def variants(self, name: str) -> list[TopKLogprobs]:
        """The scores after each prompt of a kind."""
        if name not in self.lists:
            raise ValueError(
                f"There is no signal {name!r}; there are {', '.join(self.lists)}. `needs` asks for others."
            )
        return self.lists[name]

    def get(self, name: str, default=None):
        """The scores after the only prompt of a kind, or `default`."""
        return self[name] if name in self else default

    def most(self, kind: str) -> int:
        """The most prompts of a kind that any response was scored after."""
        return max((len(parts) for name, parts in self.lists.items() if name.endswith(f"/{kind}")), default=0)

    def __getitem__(self, name: str) -> TopKLogprobs:
        first, *others = self.variants(name)
        if others:
            raise ValueError(f"{name!r} was scored after {1 + len(others)} prompts; take them with `variants`.")
        return first

    def __iter__(self) -> Iterator[str]:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.lists)

    def __contains__(self, name: object) -> bool:
        return name in self.lists

    def to(self, device) -> Signals:
        """The same on another device."""
        return Signals({name: [part.to(device) for part in parts] for name, parts in self.lists.items()})


@dataclass(frozen=True)
class SelectionSettings:
    """
    What a user can set about selection.

    Args:
        retention_ratio (`float`): Nominal share of each response that is kept, in (0, 1].
        min_tokens (`int`): Fewest tokens kept in a response.
        seed (`int`): Seed of methods that draw.
        iw_max_weight (`float`): Largest weight of the importance-weighted method.
        credit_lambda (`float`, *optional*): Strength of the contrast; `None` takes the method's own.
        method_settings (`dict`): Those that the method declares itself, by name; defaults hold for what is left out.
    """

    retention_ratio: float = 0.2
    min_tokens: int = 1
    seed: int = 42
    iw_max_weight: float = 1.5
    credit_lambda: float | None = None
    method_settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class SelectionContext:
    """
    What a method's functions see beside the signals.

    Args:
        loss_mask (`torch.BoolTensor` of shape `[B, T]`): Positions that may be kept.
        settings (`SelectionSettings`): The user's settings.
        step (`int`): Global optimizer step.
        rows (`torch.LongTensor` of shape `[B]`): Index of each response in the global rollout batch.
        gather (`Callable`, *optional*): Concatenates 1-D values of all processes; see `quantile_normalize`.
        measures (`dict[str, torch.Tensor]`): Filled by the functions with `[B, T]` quantities worth logging or
            plotting, under the name they should carry there.
        method_settings (`dict`): The method's own settings.
        rewards (`dict[str, torch.Tensor]`): Rewards `[B]` by the name of their function, as it returned them: without
            weights, NaN for `None`. Empty without a reward function.
        advantages (`torch.Tensor` of shape `[B]`): What GRPO makes of the weighted rewards (A_base); zeros without.
        kept (`torch.BoolTensor` of shape `[B, T]`): What is kept; `None` as long as `score` and `keep` are asked.
    """

    loss_mask: torch.Tensor
    settings: SelectionSettings
    step: int
    rows: torch.Tensor
    gather: Gather | None = None
    measures: dict[str, torch.Tensor] = field(default_factory=dict)
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, torch.Tensor] = field(default_factory=dict)
    advantages: torch.Tensor | None = None
    kept: torch.Tensor | None = None

    @property
    def positions(self) -> torch.Tensor:
        """Place of each token in its response, from 0 on, `[B, T]`."""
        return torch.arange(self.loss_mask.size(1), device=self.loss_mask.device).expand(self.loss_mask.shape)

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each response up to the last that may be kept, `[B]`."""
        return torch.where(self.loss_mask, self.positions + 1, 0).max(-1).values

    def pooled(self, values: torch.Tensor, where: torch.Tensor | None = None) -> torch.Tensor:
        """Those of `[B, T]` values that stand in `where`, by default in `loss_mask`, of all processes: 1-D."""
        values = values[self.loss_mask if where is None else where]
        return values if self.gather is None else self.gather(values)


TokenFunction = Callable[[Signals, SelectionContext], torch.Tensor]
