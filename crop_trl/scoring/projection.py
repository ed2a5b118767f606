"""From hidden states to log-probabilities by one of two roads: [`MatrixHead`] multiplies in tiles, as nearly every
model does; [`OwnHead`] lets the model's own forward make the logits, slower and exactly."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from .entries import ABSENT, EntriesInTiles
from .topk import head_transform, tile_rows, topk_in_tiles, topk_projection

# Vocabulary columns of a tile in the differentiable projection.
_CHUNK = 32768
# How far logits of the two roads may lie apart, as a share of the largest: rounding of half precision stays far below.
_APART = 0.02


def backbone_of(model: PreTrainedModel) -> torch.nn.Module:
    """The part of a causal language model that makes hidden states."""
    if model.base_model is not model:
        return model.base_model
    return next((part for part in model.children() if isinstance(part, PreTrainedModel)), model)


@contextmanager
def forward_as(module: torch.nn.Module, function: Callable) -> Iterator[None]:
    """Let `function` be the forward of `module`, whose hooks then fire and gather its weights."""
    own = module.__dict__.get("forward")
    module.forward = function
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextmanager
def _unwatched(model: PreTrainedModel) -> Iterator[None]:
    """Let modules of a model that ZeRO-3 split run beside its forward, without the hooks that note their order."""
    inside = set(backbone_of(model).modules())
    outside = [module for module in model.modules() if module not in inside]
    weights = {p for module in outside for p in module.parameters(recurse=False)}
    if not any(hasattr(weight, "ds_id") for weight in weights):
        yield
        return
    import deepspeed

    modules = [(module, module._forward_pre_hooks, module._forward_hooks) for module in model.modules()]
    try:
        for module, *_ in modules:
            module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
        with deepspeed.zero.GatheredParameters(sorted(weights, key=lambda weight: weight.ds_id)):
            yield
    finally:
        for module, before, after in modules:
            module._forward_pre_hooks, module._forward_hooks = before, after


class MatrixHead:
    """The head is a matrix, with a bias, a scale or a soft cap at most."""

    def __init__(self, model: PreTrainedModel):
        # Looked up at each call: FSDP and PEFT replace the head after patching.
        self.module = model.get_output_embeddings()
        self.softcap, self.scale = head_transform(model.config)

    def _call(self, function: Callable, chosen: torch.Tensor, *per_row: torch.Tensor):
        def project(chosen, *per_row):
            weight, bias = self.module.weight, self.module.bias
            if isinstance(weight, DTensor):
                weight, bias = weight.full_tensor(), None if bias is None else bias.full_tensor()
            return function(chosen.to(weight.device), weight, bias, *(part.to(weight.device) for part in per_row))

        with forward_as(self.module, project):
            return self.module(chosen, *per_row)

    def topk(self, chosen: torch.Tensor, targets: torch.Tensor, top_k: int, as_trained: bool):
        """See [`~crop_trl.scoring.topk.topk_in_tiles`]."""

        def project(chosen, weight, bias, targets):
            transform = {"bias": bias, "softcap": self.softcap, "scale": self.scale}
            return topk_projection(chosen, weight, targets, top_k, **transform, as_trained=as_trained)

        return self._call(project, chosen, targets)

    def logprobs(self, chosen: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each target and entropy, `[N]`, with gradient."""

        def project(chosen, weight, bias, targets):
            arguments = (1.0, min(_CHUNK, weight.size(0)), self.softcap, self.scale, ("entropy",))
            return ChunkedLogProbFunction.apply(chosen, weight, bias, targets, *arguments)[:2]

        return self._call(project, chosen, targets)

    def entries(self, chosen: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Log-probability of each target, entropy, log-probabilities `[N, K + 1]` of `ids` and of all others."""

        def project(chosen, weight, bias, targets, ids):
            arguments = (weight, bias, targets, ids, self.softcap, self.scale)
            of_targets, of_ids, rest, mean = EntriesInTiles.apply(chosen, *arguments)
            logits = torch.cat([of_ids, rest[:, None]], dim=1)
            total = logits.logsumexp(1)
            logprobs = logits - total[:, None]
            means = torch.cat([of_ids, mean[:, None]], dim=1).detach()
            return of_targets - total, total.detach() - (logprobs.detach().exp() * means).sum(1), logprobs

        return self._call(project, chosen, targets, ids)


class OwnHead:
    """What the model's own forward does behind its backbone, whatever it is."""

    def __init__(self, model: PreTrainedModel, forward: Callable, output_type: type):
        self.model, self.forward, self.output_type = model, forward, output_type

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[n, V]` in fp32 of hidden states `[n, H]`: the forward is run with these in the backbone's place."""

        def given(*args, **kwargs):
            return self.output_type(last_hidden_state=hidden[None])

        ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
        backbone = backbone_of(self.model)
        # The decoders of encoder-decoder models call what is inside their backbone.
        inner = backbone.get_decoder() if hasattr(backbone, "get_decoder") else backbone
        with forward_as(backbone, given), forward_as(inner, given):
            return self.forward(self.model, input_ids=ids, use_cache=False).logits[0].float()

    def topk(self, chosen: torch.Tensor, targets: torch.Tensor, top_k: int, as_trained: bool):
        """See [`~crop_trl.scoring.topk.topk_in_tiles`]."""
        vocab = self.model.config.get_text_config().vocab_size
        return topk_in_tiles(chosen, self.logits, vocab, targets.to(chosen.device), top_k)

    def logprobs(self, chosen: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each target and entropy, `[N]`, with gradient."""

        def tile(hidden, targets):
            logprobs = self.logits(hidden).log_softmax(-1)
            of_targets = logprobs.gather(-1, targets[:, None]).squeeze(-1)
            return of_targets, -(logprobs.exp() * logprobs).sum(-1)

        return self._in_tiles(tile, chosen, targets)

    def entries(self, chosen: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See [`MatrixHead.entries`]."""

        def tile(hidden, targets, ids):
            logprobs = self.logits(hidden).log_softmax(-1)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            # One column more, for ids beyond the head.
            logprobs = torch.nn.functional.pad(logprobs, (0, 1), value=ABSENT)
            ids = ids.long().clamp(max=logprobs.size(1) - 1)
            rest = logprobs.scatter(-1, ids, ABSENT).logsumexp(-1, keepdim=True)
            of_ids = torch.cat([logprobs.gather(-1, ids), rest], dim=-1)
            return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy, of_ids

        return self._in_tiles(tile, chosen, targets, ids)

    def _in_tiles(self, tile: Callable, chosen: torch.Tensor, *per_row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What `tile` makes of some rows, for all of them; a tile's logits are made again for its gradient."""
        # A process without kept tokens runs the modules all the same: the others wait for it in theirs.
        real, filler = len(chosen), int(not len(chosen))
        parts = (chosen, *(part.to(chosen.device) for part in per_row))
        parts = [torch.cat([part, part.new_zeros((filler, *part.shape[1:]))]) for part in parts]
        rows = tile_rows(chosen.device, self.model.config.get_text_config().vocab_size)
        tiles = zip(*(part.split(rows) for part in parts))
        made = zip(*(checkpoint(tile, *part, use_reentrant=False) for part in tiles))
        return tuple(torch.cat(part)[:real] for part in made)


def projection_of(model: PreTrainedModel, forward: Callable, output_type: type, width: int) -> MatrixHead | OwnHead:
    """The road for a model inside its forward, found out once, on random small and large hidden states."""
    head, own = model.get_output_embeddings(), OwnHead(model, forward, output_type)
    if not _is_matrix(head) or head.in_features != width:
        return own
    matrix = MatrixHead(model)
    if getattr(model, "_head_is_matrix", None) is None:
        with _unwatched(model):
            model._head_is_matrix = _agree(matrix, own)
    return matrix if model._head_is_matrix else own


def _is_matrix(head) -> bool:
    # PEFT's layers and wrappers, and a forward that was replaced (TRL's cast to fp32), are more than their weight.
    replaced = "forward" in vars(head) and not hasattr(head, "_hf_hook")
    plain = isinstance(head, torch.nn.Linear) and not isinstance(head, BaseTunerLayer)
    return plain and not replaced and head.weight.is_floating_point()


@torch.no_grad()
def _agree(matrix: MatrixHead, own: OwnHead) -> bool:
    weight = matrix.module.weight
    draw = torch.randn((4, matrix.module.in_features), generator=torch.Generator().manual_seed(0))
    hidden = (draw * torch.tensor([[1.0], [1.0], [30.0], [30.0]])).to(weight.device, own.model.dtype)
    try:
        theirs = own.logits(hidden).log_softmax(-1)
    except Exception:  # a forward of another form; the check against whole logits has the last word
        return True
    ids, values, _ = matrix.topk(hidden, torch.zeros(4, dtype=torch.long, device=weight.device), 8, as_trained=True)
    apart = (theirs.gather(-1, ids.long()) - values).abs().amax(-1)
    spread = theirs.amax(-1) - theirs.mean(-1)
    return bool((apart <= _APART * spread.clamp(min=1.0)).all())
