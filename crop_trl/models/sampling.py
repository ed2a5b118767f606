"""Sampling from a model's own distribution, whatever its folder recommends for use."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .adapters import base_of

# What bends the distribution that tokens are drawn from.
_FILTERS = (
    *("temperature", "top_p", "top_k", "repetition_penalty"),
    *("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "encoder_repetition_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens"),
    *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    *("min_length", "min_new_tokens", "guidance_scale", "watermarking_config", "num_beams", "penalty_alpha"),
    *("max_time", "num_return_sequences", "prompt_lookup_num_tokens", "stop_strings"),
)


@contextmanager
def own_distribution(model) -> Iterator[None]:
    """Let `generate` draw from the model's own distribution, but for what it is told in the call."""
    holder = base_of(model)
    recommended = holder.generation_config
    holder.generation_config = copy.copy(recommended)
    for name in _FILTERS:
        setattr(holder.generation_config, name, None)
    try:
        yield
    finally:
        holder.generation_config = recommended


class SameDraws:
    """Blocks that draw the same random numbers: those of the first; later ones leave no trace in the generators."""

    def __init__(self):
        self._first = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """One block."""
        if self._first is None:
            self._first = torch.get_rng_state(), torch.cuda.get_rng_state_all()
            yield
            return
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.set_rng_state(self._first[0])
            torch.cuda.set_rng_state_all(self._first[1])
            yield
