"""A teacher that several cards hold together, a process each, split by transformers' tensor parallelism."""

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ..methods.context import TopKLogprobs
from .local import LocalScorer


class TensorParallelScorer(LocalScorer):
    """In the first process a scorer as any; the others [`follow`][TensorParallelScorer.follow]."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # On CPUs, where to wait for the next request costs nothing and may take for ever.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=365))

    def _tell(self, asked: tuple | None) -> tuple | None:
        told = [asked]
        dist.broadcast_object_list(told, src=0, group=self._group)
        return told[0]

    def score(self, prompt_ids, completion_ids, top_k=None) -> TopKLogprobs:
        """See [`LocalScorer.score`]."""
        return super().score(*self._tell((prompt_ids, completion_ids, top_k)))

    def follow(self) -> None:
        """Score what the first process is asked, until it ends."""
        while (asked := self._tell(None)) is not None:
            with suppress(ValueError):  # the first process says it
                super().score(*asked)

    def end(self) -> None:
        """Let the others go."""
        self._tell(None)
