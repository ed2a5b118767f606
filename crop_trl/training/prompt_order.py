"""What decides which prompts a step takes; a resumed run takes the next ones only while it is the same."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from datasets import Dataset
from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler

# Of the settings, those that a step's share of the prompts follows from.
_SETTINGS = (
    *("prompts_per_step", "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("steps_per_generation", "num_iterations", "shuffle_dataset", "seed"),
)


class PromptSampler(Sampler):
    """GRPO's sampler, with an order that follows from the seed and the number of the epoch (from 0) alone.

    A generator that goes on from epoch to epoch would give a run that resumes in the third the order of the first.
    `dropped` is how many places were passed over without a step: all that follows moves up, across epochs."""

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int], dropped: Callable[[], int]):
        self.sampler, self.epoch, self.dropped = sampler, epoch, dropped

    def __iter__(self) -> Iterator[int]:
        if not self.dropped():
            return self._order(self.epoch())
        epochs, places = divmod(self.dropped(), len(self))
        epoch = self.epoch() + epochs
        return chain(islice(self._order(epoch), places, None), islice(self._order(epoch + 1), places))

    def _order(self, epoch: int) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + epoch)
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)


def prompt_order(args, rows=None) -> dict[str, Any]:
    """What decides which prompts a step takes; of rows that cannot be read twice, or of none, settings alone."""
    order = {
        "prompts_per_rollout_batch": args.generation_batch_size // args.num_generations,
        "steps_per_rollout_batch": args.steps_per_rollout_batch,
        # A seed that nothing is drawn with may change.
        "shuffle_seed": args.seed if args.shuffle_dataset else None,
        "settings": {name: getattr(args, name) for name in _SETTINGS},
    }
    if isinstance(rows, Dataset):
        order |= {"num_prompts": len(rows), "prompts_sha256": _fingerprint(rows)}
    return order


def _fingerprint(rows: Dataset) -> str:
    """Of the prompts in their order; the library's own differs between two that were made alike."""
    digest = hashlib.sha256()
    for several in rows.with_format(None).select_columns(["prompt"]).iter(1000):
        for prompt in several["prompt"]:
            digest.update(json.dumps(prompt, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def order_trouble(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Why a run would not take the prompts that come after those of a checkpoint, and what to do."""
    changed = {name for name in ours if name != "settings" and theirs.get(name, ours[name]) != ours[name]}
    if not changed:
        return None
    pairs = [(name, theirs["settings"].get(name), now) for name, now in ours["settings"].items()]
    what = "with " + ", ".join(f"`{name}` {was} (now {now})" for name, was, now in pairs if was != now)
    if changed <= {"num_prompts", "prompts_sha256"}:
        what = f"with {theirs['num_prompts']} prompts (now {ours['num_prompts']} other ones, or in another order)"
    return f"was written {what}; set what it had, or start a new run from its weights (`model_name_or_path`)"
