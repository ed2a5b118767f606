"""An output head that projects chosen positions only, built into the forward of a model before it is wrapped: the hooks
of DDP, FSDP and DeepSpeed, which gather sharded weights, fire only when the wrapped module itself is called."""

import functools
import types
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .projection import backbone_of, projection_of


@dataclass
class TokenHeadOutput(ModelOutput):
    """What a patched model returns for the N chosen positions."""

    logprobs: torch.Tensor | None = None  # [N], of each target (nats, fp32)
    entropy: torch.Tensor | None = None  # [N], of the full distribution (nats)
    topk_ids: torch.Tensor | None = None  # [N, K]
    topk_logprobs: torch.Tensor | None = None
    entry_logprobs: torch.Tensor | None = None  # [n, K + 1], of `head_ids` and, last, of all other entries


def sees_padding(config) -> bool:
    """Whether a model's real positions depend on what follows them, so that right padding needs an attention mask."""
    text = config.get_text_config()
    return not getattr(text, "is_causal", True) or bool(getattr(text, "use_bidirectional_attention", False))


def has_token_head(model) -> bool:
    """Whether [`add_token_head`] was applied; a model that went through pickle has lost it."""
    return getattr(getattr(model.forward, "__func__", None), "is_token_head", False)


def add_token_head(model: PreTrainedModel) -> None:
    """Teach `model` to project chosen positions; its ordinary forward, and so `generate`, stay as they were.

    Called with `head_positions [N]` (flat indices into `[R * L]`) and `head_targets [N]` it runs the backbone on
    `input_ids [R, L]`, gathers those hidden states, and returns a [`TokenHeadOutput`]. Without `top_k`, log-probs and
    entropy carry gradient and only the chosen positions are ever projected, forward or backward, on any device. With
    `top_k` the K most likely entries are returned, without gradient; `as_trained` rounds them as the pass without it
    does. `head_ids [n, K]` asks for the log-probabilities of these ids too, at the first n positions, with gradient.
    Patching twice changes nothing."""
    if has_token_head(model):
        return
    # Not the bound method: a copy of the model must run its own weights.
    original_forward = getattr(model.forward, "__func__", None) or type(model).forward

    # `generate` reads the signature to learn which arguments a model takes.
    @functools.wraps(type(model).forward)
    def forward(
        self,
        *args,
        head_positions=None,
        head_targets=None,
        head_ids=None,
        top_k=None,
        as_trained=False,
        **kwargs,
    ):
        if head_positions is None:
            return original_forward(self, *args, **kwargs)
        kwargs.pop("labels", None)
        kwargs["use_cache"] = False
        output = backbone_of(self)(*args, **kwargs)
        hidden = output.last_hidden_state
        if hidden.shape[:2] != kwargs["input_ids"].shape:
            raise ValueError(
                f"The model turned {tuple(kwargs['input_ids'].shape)} tokens into {tuple(hidden.shape[:2])} positions; "
                "adapters that put tokens of their own before the prompt, such as prompt tuning, are not supported."
            )
        chosen = hidden.reshape(-1, hidden.size(-1)).index_select(0, head_positions)
        head = projection_of(self, original_forward, type(output), chosen.size(1))
        if top_k is not None:
            ids, values, logprobs = head.topk(chosen, head_targets, top_k, as_trained)
            return TokenHeadOutput(logprobs=logprobs, topk_ids=ids, topk_logprobs=values)
        if head_ids is None:
            logprobs, entropy = head.logprobs(chosen, head_targets)
            return TokenHeadOutput(logprobs=logprobs, entropy=entropy)
        # Behind those are other ends of a response; the largest id of all is that of no entry.
        more = len(head_targets) - len(head_ids)
        ids = torch.nn.functional.pad(head_ids, (0, 0, 0, more), value=torch.iinfo(head_ids.dtype).max)
        logprobs, entropy, entries = head.entries(chosen, head_targets, ids)
        return TokenHeadOutput(logprobs=logprobs, entropy=entropy, entry_logprobs=entries[: len(head_ids)])

    forward.is_token_head = True
    model.forward = types.MethodType(forward, model)
