"""A rollout bank: one batch of sampled responses with every signal, to compare methods without any model."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from ..files import replacing
from ..methods import METHODS, Selection, SelectionSettings, Signals, get_method, select, settings_of
from ..prompts import NEGATIVE, ORIGINAL, TEACHER, first_prompts, prompt_variants, split_signal
from ..scoring import TopKLogprobs
from ..training.responses import ScoredResponses

_REWARD = "reward/"  # before a function's name
_DESCRIBED = ("rows", "step", "settings")


@dataclass
class RolloutBank:
    """
    Sampled responses and how teacher and student scored them.

    Args:
        completion_ids (`torch.LongTensor` of shape `[B, T]`): Responses, right-padded with zeros.
        loss_mask (`torch.BoolTensor` of shape `[B, T]`): Response tokens that may be kept.
        signals ([`~crop_trl.methods.Signals`]): By name, `[B, T, K]`.
        rows (`list[dict]`): What the dataset says of each response, for reading: all its `prompts` by kind, its
            `answer` and `solution`.
        step (`int`): Global step at which they were sampled; methods that draw depend on it.
        settings (`dict`): Whatever describes the run, JSON-serialisable: student, teacher, dataset, seed.
        rewards (`dict[str, torch.Tensor]`): By the name of their function, `[B]`, without weights.
        advantages (`torch.Tensor` of shape `[B]`, *optional*): What GRPO made of them.
    """

    completion_ids: torch.Tensor
    loss_mask: torch.Tensor
    signals: Signals
    rows: list[dict[str, Any]]
    step: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, torch.Tensor] = field(default_factory=dict)
    advantages: torch.Tensor | None = None

    @property
    def texts(self) -> dict[str, list[str]]:
        """The first prompt of each kind that all rows have, B of each."""
        return first_prompts(self.rows)

    def select(self, method: str, settings: SelectionSettings | None = None) -> Selection:
        """What a method would train of these responses; the same call that the trainer makes."""
        # Several methods are looked at with the settings of one.
        settings = settings_of(method, settings or SelectionSettings())
        rewarded = {"rewards": self.rewards, "advantages": self.advantages}
        return select(method, self.signals, self.loss_mask, settings, step=self.step, **rewarded)

    def runnable_methods(self) -> list[str]:
        """Methods of which all that they need is here, in the order of the table."""
        return [
            name
            for name, method in METHODS.items()
            if set(method.needs) <= set(self.signals) and (self.rewards or not method.needs_rewards)
        ]

    def choosing_methods(self) -> list[str]:
        """Those of them that keep some tokens and not others, and `opd` for all that keep every token."""
        return [name for name in self.runnable_methods() if name == "opd" or get_method(name).chooses]

    def gap(self, method: str = "opd") -> torch.Tensor:
        """Student-teacher gap `log S - log T` of the sampled tokens (nats), `[B, T]`; T is the method's target."""
        target = self.signals[get_method(method).target]
        return self.signals["student/original"].sampled_logprobs - target.sampled_logprobs

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all."""
        tensors = {"completion_ids": self.completion_ids, "loss_mask": self.loss_mask}
        tensors |= {f"{_REWARD}{name}": value for name, value in self.rewards.items()}
        if self.advantages is not None:
            tensors["advantages"] = self.advantages
        for name, parts in self.signals.lists.items():
            for m, part in enumerate(parts):
                suffix = f"#{m}" if len(parts) > 1 else ""
                values = {f"{name}{suffix}:{f.name}": getattr(part, f.name) for f in fields(part)}
                tensors |= {key: value for key, value in values.items() if value is not None}
        metadata = {name: json.dumps(getattr(self, name)) for name in _DESCRIBED}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, temporary, metadata=metadata)

    @classmethod
    def load(cls, path: str | Path) -> "RolloutBank":
        """Read what [`RolloutBank.save`] wrote. Raises `ValueError` when the file is something else."""
        try:
            with safe_open(str(path), framework="pt") as stored:
                metadata = stored.metadata() or {}
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        except (OSError, SafetensorError) as error:
            message = f"{path} cannot be read as a rollout bank ({error}); delete it and sample again."
            raise ValueError(message) from error
        if "rows" not in metadata or not {"loss_mask", "completion_ids"} <= set(tensors):
            raise ValueError(f"{path} is not a rollout bank; make one with `crop-trl replay`.")
        rewards = {key.removeprefix(_REWARD): tensors.pop(key) for key in sorted(tensors) if key.startswith(_REWARD)}
        advantages = tensors.pop("advantages", None)
        parts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
        for key in sorted(tensors.keys() - {"completion_ids", "loss_mask"}):
            full_name, attribute = key.split(":")
            name, _, m = full_name.partition("#")
            parts.setdefault(name, {}).setdefault(int(m or 0), {})[attribute] = tensors[key]
        signals = {name: [TopKLogprobs(**variants[m]) for m in sorted(variants)] for name, variants in parts.items()}
        return cls(
            completion_ids=tensors["completion_ids"],
            loss_mask=tensors["loss_mask"],
            signals=Signals(signals),
            rewards=rewards,
            advantages=advantages,
            **{name: json.loads(metadata[name]) for name in _DESCRIBED},
        )


def bank_of(sampled: ScoredResponses) -> RolloutBank:
    """A bank of responses as they were sampled, on the CPU."""
    return RolloutBank(
        completion_ids=pad_sequence([torch.tensor(ids) for ids in sampled.completion_ids], batch_first=True),
        loss_mask=sampled.loss_mask.cpu(),
        signals=sampled.signals.to("cpu"),
        rows=sampled.said,
        step=sampled.step,
        rewards={name: value.cpu() for name, value in sampled.rewards.items()},
        advantages=None if sampled.advantages is None else sampled.advantages.cpu(),
    )


def collect_bank(trainer, rows: Iterable[Mapping[str, Any]], responses: int | None = None) -> RolloutBank:
    """Sample responses to each row, on one process, with every signal of every method that the rows allow."""
    rows = list(rows)
    enough = len({str(row["prompt"]) for row in rows}) > trainer.args.credit_num_negatives

    def allowed(need: str) -> bool:
        reader, kind = split_signal(need)
        if reader not in (TEACHER, *trainer.scorers) or (trainer.prompt_maker and kind != ORIGINAL):
            return False
        return enough if kind == NEGATIVE else all(prompt_variants(row, kind) for row in rows)

    # Methods that need what some row lacks, or more unrelated prompts than there are, are left out of a replay.
    needs = {need for method in METHODS.values() for need in method.needs}
    return bank_of(trainer.sample(rows, sorted(filter(allowed, needs)), responses))


def kept_overlap(bank: RolloutBank, names: Sequence[str], settings: SelectionSettings | None = None) -> torch.Tensor:
    """Overlap of what M methods keep, `[M, M]`: entry (i, j) is the share of tokens kept by i that j keeps too."""
    masks = torch.stack([bank.select(name, settings).mask.flatten() for name in names]).double()
    return (masks @ masks.t()) / masks.sum(-1, keepdim=True)


def caught_share(
    bank: RolloutBank,
    name: str,
    threshold: float = 2.0,
    settings: SelectionSettings | None = None,
    trained: str = "opd",
) -> float | None:
    """Share of the tokens with a gap above `threshold` nats to the target of the method `trained` that a method keeps;
    `None` without any."""
    large = bank.loss_mask & (bank.gap(trained) > threshold)
    kept = bank.select(name, settings).mask
    return (kept & large).sum().item() / large.sum().item() if large.any() else None
