"""Scoring a fixed response with a Hugging Face model, teacher or student."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..methods.context import TopKLogprobs
from ..models.fp8 import Fp8Linear
from .head import TokenHeadOutput, add_token_head, sees_padding
from .layout import PackedBatch, group_by_length, pack, padded_length


@dataclass
class ScoringStats:
    """What scoring cost since the last [`ScoringStats.reset`]."""

    sequences: int = 0
    forwards: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    move_seconds: float = 0.0  # in which weights were brought to the device
    stops: int = 0  # responses that stopped with one of several end tokens
    other_ends: int = 0  # those of them where the model gives the other ends more than the sampled one

    @property
    def padding_share(self) -> float:
        """Share of the processed tokens that was padding."""
        return 1.0 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    def metrics(self) -> dict[str, float]:
        """What is worth logging."""
        return {
            "sequences": float(self.sequences),
            "forwards": float(self.forwards),
            "tokens": float(self.tokens),
            "padding_share": self.padding_share,
            **({"move_seconds": self.move_seconds} if self.move_seconds else {}),
            **({"other_ends": self.other_ends / self.stops} if self.stops else {}),
        }

    def reset(self) -> None:
        """Start counting anew."""
        self.__init__()


class LocalScorer:
    """
    Scores fixed responses with a model in this process.

    Args:
        model ([`~transformers.PreTrainedModel`] or a wrapper of one):
            Patched by [`~crop_trl.scoring.head.add_token_head`] (done here for a bare model).
        top_k (`int`): Vocabulary entries to return at each position.
        pad_token_id (`int`): Any valid id; it never influences a result.
        tokens_per_batch (`int`, *optional*, defaults to `16384`): Tokens of one forward pass, padding included.
        context (`Callable`, *optional*): Makes a context manager round each forward, such as `accelerator.autocast`.
        agree (`Callable`, *optional*):
            For a model that is spread over processes, all of which have to make the same number of forwards: takes the
            number that this process needs and returns the largest on any.
        as_trained (`bool`, *optional*, defaults to `False`):
            Round as the model's training pass does, for a model that is in training.
        ready (`Callable`, *optional*):
            Makes a context manager round each call of [`LocalScorer.score`], within which the model has the weights to
            score with, on their device.
        pad_to_multiple_of (`int`, *optional*, defaults to `1`):
            Pad each forward to a length that is a multiple of this.
        end_token_id (`int`, *optional*): What ends a response by the tokenizer, beside the model's own configuration.
    """

    remedy = "choose another `attn_implementation` in `teacher_init_kwargs`, such as 'eager'"

    def __init__(
        self,
        model,
        top_k: int,
        pad_token_id: int,
        tokens_per_batch: int = 16384,
        context: Callable[[], AbstractContextManager] = nullcontext,
        agree: Callable[[int], int] | None = None,
        as_trained: bool = False,
        ready: Callable[[], AbstractContextManager] = nullcontext,
        pad_to_multiple_of: int = 1,
        end_token_id: int | None = None,
    ):
        self.model = model
        self.top_k = top_k
        self.tokens_per_batch = tokens_per_batch
        self.context = context
        self.agree = agree
        self.as_trained = as_trained
        self.ready = ready
        self.stats = ScoringStats()
        if isinstance(model, PreTrainedModel):
            add_token_head(model)
        self._config = self._bare.config
        self._end_token_id = end_token_id
        self.layout = {
            "pad_token_id": pad_token_id,
            "with_attention_mask": sees_padding(self._config),
            "pad_to_multiple_of": pad_to_multiple_of,
            "ends": (),  # which count as one, see [`~crop_trl.training.ends.share_ends`]
        }

    @property
    def _bare(self):
        return getattr(self.model, "module", self.model)

    @property
    def ends(self) -> set[int] | None:
        """Ids that end a response for the model; `None` when it does not say."""
        ends = getattr(getattr(self._bare, "generation_config", None), "eos_token_id", None)
        ends = ends if isinstance(ends, list) else [ends]
        return {end for end in (*ends, self._end_token_id) if end is not None} or None

    @property
    def precision(self) -> str:
        """Type of the weights, the coarsest of several, or `"quantised"`."""
        if getattr(self._bare, "is_quantized", False) or any(isinstance(m, Fp8Linear) for m in self._bare.modules()):
            return "quantised"
        found = {str(p.dtype).removeprefix("torch.") for p in self._bare.parameters()}
        return next((kind for kind in ("bfloat16", "float16") if kind in found), "float32")

    @torch.no_grad()
    def apart_from_own(self, prompt: Sequence[int], completion: Sequence[int]) -> tuple[float, float]:
        """Mean distance of scores from the logits of the model's own forward, and what rounding explains (nats)."""
        scored, n = self.score([prompt], [completion]), len(prompt) + len(completion)
        follow = [] if self.layout["with_attention_mask"] else completion[::-1]
        with self.ready(), self.context():
            ids = torch.tensor([[*prompt, *completion, *follow]], device=scored.logprobs.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : n - 1]
        own = logits.float().log_softmax(-1).to(scored.logprobs.device).gather(-1, scored.token_ids[0].long())
        return (own - scored.logprobs[0]).abs().mean().item(), torch.finfo(logits.dtype).eps * logits.abs().max().item()

    def reading_with(self, ready: Callable[[], AbstractContextManager]) -> "LocalScorer":
        """A scorer that reads with the same model, within what `ready` makes of it."""
        other = copy(self)
        other.ready, other.stats = ready, ScoringStats()
        return other

    @torch.no_grad()
    def score(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        top_k: int | None = None,
    ) -> TopKLogprobs:
        """
        Log-probabilities of the top K and of the response token, at every response position.

        Args:
            prompt_ids, completion_ids (B lists of token ids):
                Token ids in, never text: the response must be the very tokens that were sampled.
            top_k (`int`, *optional*): Overrides the scorer's own.

        Returns:
            [`TopKLogprobs`] with T the longest response, aligned on the response: position t of a row predicts its
            token t, whatever the prompt's length.

        Raises:
            `ValueError`: the two lists differ in length, or a prompt has no tokens.
        """
        if len(prompt_ids) != len(completion_ids):
            raise ValueError(f"Got {len(prompt_ids)} prompts for {len(completion_ids)} completions.")
        top_k = self.top_k if top_k is None else top_k
        with self.ready() as lent:
            self.stats.move_seconds += getattr(lent, "seconds", 0.0)
            return self._score(prompt_ids, completion_ids, top_k)

    def _score(self, prompt_ids, completion_ids, top_k: int) -> TopKLogprobs:
        device = next(self.model.parameters()).device
        vocab = self._config.get_text_config().vocab_size
        k = min(top_k, vocab)
        shape = (len(completion_ids), max(map(len, completion_ids), default=0))
        token_ids = torch.zeros((*shape, k), dtype=torch.int32, device=device)
        logprobs = torch.zeros((*shape, k), dtype=torch.float32, device=device)
        sampled_logprobs = torch.zeros(shape, dtype=torch.float32, device=device)

        lengths = [
            padded_length(len(p) + len(c), self.layout["pad_to_multiple_of"])
            for p, c in zip(prompt_ids, completion_ids, strict=True)
        ]
        groups = group_by_length(lengths, self.tokens_per_batch)
        gained = []  # at each stop, of log-probability by all ends over the one that was sampled
        # Before the first forward: in between, one process would gather weights while another counts.
        idle = 0 if self.agree is None else self.agree(len(groups)) - len(groups)
        for rows in groups:
            batch = pack(prompt_ids, completion_ids, rows, **self.layout)
            largest = int(batch.input_ids.max())
            if largest >= vocab:
                raise ValueError(
                    f"Token {largest} is to be scored by a model with {vocab} vocabulary entries: the "
                    "student drew one that only pads its output head; choose a teacher with as many, or cut that head."
                )
            self.stats.forwards += 1
            self.stats.sequences += len(rows)
            self.stats.tokens += batch.num_tokens
            self.stats.padded_tokens += batch.input_ids.numel()
            output = self._forward(batch.to(device), k)
            where, n = (batch.rows, batch.columns), len(batch.rows)
            token_ids[where] = output.topk_ids[:n].to(device)
            logprobs[where] = output.topk_logprobs[:n].float().to(device)
            of_targets = output.logprobs.float().to(device)
            sampled_logprobs[where] = joined = batch.join_ends(of_targets)
            gained.append(joined[batch.stops] - of_targets[batch.stops])
        one_token = [[self.layout["pad_token_id"]]]
        for _ in range(idle):
            batch = pack(one_token, one_token, [0], **self.layout)
            self._forward(batch.to(device), k)

        if self.layout["ends"] and gained:
            gained = torch.cat(gained)
            self.stats.stops += len(gained)
            self.stats.other_ends += int((gained > math.log(2)).sum())
        completion_lengths = torch.tensor([len(c) for c in completion_ids], device=device)
        mask = torch.arange(shape[1], device=device) < completion_lengths[:, None]
        return TopKLogprobs(token_ids, logprobs, sampled_logprobs, mask)

    def _forward(self, batch: PackedBatch, top_k: int) -> TokenHeadOutput:
        with self.context():
            return self.model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                head_positions=batch.positions,
                head_targets=batch.targets,
                top_k=top_k,
                as_trained=self.as_trained,
            )
