"""Sampling without an engine, at an engine's pace: one token for every row is one CUDA graph, replayed."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import AttentionInterface, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from .adapters import base_of
from .sharding import fsdp_version, zero_stage

_ATTENTION = "crop_trl_one_token"
_LOOK = 16  # tokens between two looks at whether all rows have ended
_ROUND = 64  # lengths of the cache are a multiple of this


def one_token_attention(
    sdpa: Callable, module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs
):
    """SDPA `[B, H, T, D]` over keys that query heads share: they are queries of one head, no key is copied."""
    if softcap is not None or s_aux is not None:
        raise ValueError("`use_cuda_graphs` knows plain attention only; leave it off for this student.")
    batch, heads, length, width = query.shape
    shared = heads // key.size(1)
    query = query.to(value.dtype).reshape(batch, key.size(1), shared * length, width)
    mask = attention_mask if length == 1 else attention_mask.repeat(1, 1, shared, 1)
    output = sdpa(query, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, heads, length, width).transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, partial(one_token_attention, torch.nn.functional.scaled_dot_product_attention))


class HalfLayer(StaticLayer):
    """
    Keys and values in the dtype in which attention reads them, in columns that all layers are told at once. Attention
    reads the first `reads` of them.
    """

    def __init__(self, max_cache_len: int, dtype: torch.dtype):
        super().__init__(max_cache_len)
        self._stored = dtype
        self.columns: torch.Tensor
        self.reads: int

    def update(self, key_states, value_states, *args, **kwargs):
        key_states, value_states = key_states.to(self._stored), value_states.to(self._stored)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[:, :, self.columns] = key_states
        self.values[:, :, self.columns] = value_states
        return self.keys[:, :, : self.reads], self.values[:, :, : self.reads]


def make_sampler(model, args):
    """A sampler of the student. Raises `ValueError` for weights in pieces, and for a cache that is more than keys."""
    if zero_stage(args) == 3 or fsdp_version(args):
        raise ValueError("`use_cuda_graphs` needs whole weights on each GPU; use ddp or zero2, or leave it off.")
    text = base_of(model).config.get_text_config()
    everywhere = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    kinds = set(getattr(text, "layer_types", None) or [everywhere])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"`use_cuda_graphs` works with full attention only, not {', '.join(sorted(kinds))}; leave it off."
        )
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    precision = half or base_of(model).dtype, half is not None
    if args.shared_sampler:
        from .shared_sampling import SharedSampler

        return SharedSampler(model, *precision, args.shared_sampler, args.per_device_train_batch_size)
    return GraphSampler(model, *precision, args.compile_layers)


@contextmanager
def drawing_by(sampler, model) -> Iterator[None]:
    """Let the model's own `generate` be that of the sampler."""
    model.generate = sampler.generate
    try:
        yield
    finally:
        del model.generate


def cache_length(tokens: int) -> int:
    """Columns of a cache that holds so many tokens."""
    return -(-tokens // _ROUND) * _ROUND


def last_logits(model, ids, mask, positions, cache: Cache) -> torch.Tensor:
    """Logits `[B, V]` after the last of some tokens `[B, T]`, which go into the cache."""
    read = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}
    return model(**read, use_cache=True, logits_to_keep=1).logits[:, -1]


def copy_of(model: PreTrainedModel, dtype: torch.dtype, apart: dict, attention: str = _ATTENTION) -> PreTrainedModel:
    """The model to sample with: the weights of its linear layers in `dtype`, each of its own."""
    found = copy.deepcopy(model, apart).requires_grad_(False).eval()
    base_of(found).set_attn_implementation(attention)
    for module in found.modules():
        if isinstance(module, torch.nn.Linear):
            # Of its own, also where the head shares the embedding's.
            module.weight = torch.nn.Parameter(module.weight.detach().to(dtype, copy=True), False)
    return found


class GraphSampler:
    """
    Draws responses from a causal language model in the precision it is trained with.

    Under autocast the weights of its linear layers are copied in half precision before every batch, once, instead of
    being cast for every token; the values are those that autocast gives. Graphs are captured for each number of rows,
    and again for rows that are longer than any before; one for each part of the cache that attention has to read.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, autocast: bool, compiled: bool = False):
        self._model, self._dtype, self._autocast, self._compiled = model, dtype, autocast, compiled
        self._copy: PreTrainedModel | None = None
        self._batches: dict[int, Batch] = {}

    def _sync(self) -> PreTrainedModel:
        if self._copy is None:
            self._copy = copy_of(self._model, self._dtype, {id(self): self})
            return self._copy
        ours, theirs = (dict(model.named_parameters(remove_duplicate=False)) for model in (self._copy, self._model))
        torch._foreach_copy_(list(ours.values()), [theirs[name].detach() for name in ours])
        return self._copy

    @torch.no_grad()
    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: GenerationConfig, **kwargs
    ) -> torch.Tensor:
        """As `generate` with `do_sample`: prompts `[B, P]`, padded on the left, and responses, `[B, P + N]`."""
        model = self._sync()
        rows, width = input_ids.shape
        config = generation_config
        length = cache_length(width + config.max_new_tokens)
        batch = self._batches.get(rows)
        if batch is None or batch.length < length or batch.settings != decoding_of(config):
            self._batches[rows] = batch = None
            precision = self._dtype, self._autocast
            self._batches[rows] = batch = Batch(model, rows, length, decoding_of(config), *precision, self._compiled)
        return batch.sample(input_ids, attention_mask, config.max_new_tokens)


def decoding_of(config: GenerationConfig) -> tuple[float, tuple[int, ...], int]:
    """Temperature, ids that end a response, and the id of padding."""
    ends = config.eos_token_id
    ends = ends if isinstance(ends, Iterable) else [] if ends is None else [ends]
    return config.temperature, tuple(ends), config.pad_token_id


class Batch:
    """Memory for a number of rows, and the graphs that draw one token for each."""

    def __init__(self, model, rows: int, length: int, settings, dtype: torch.dtype, autocast: bool, compiled: bool):
        device = next(model.parameters()).device
        self.model, self.length, self.settings = model, length, settings
        # A whole step is small enough for one graph; prompts have too many widths to compile for.
        self.one_token = torch.compile(model, dynamic=False) if compiled else model
        # Attention reads as many columns as are filled, in steps of an eighth; compiled code has one width.
        self.part = length if compiled else cache_length(length // 8)
        # Weights are cast already, so there is nothing to keep.
        self.autocast = partial(torch.autocast, device.type, dtype, autocast, cache_enabled=False)
        self.temperature, ends, self.pad = settings
        self.ends = torch.tensor(ends, dtype=torch.long, device=device)
        layers = base_of(model).config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[HalfLayer(length, dtype) for _ in range(layers)])
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)  # of the cache, the same in every row
        self.mask = torch.zeros(rows, 1, 1, length, dtype=dtype, device=device)  # 0 where a row looks, else -inf
        self.ended = torch.zeros(rows, 1, dtype=torch.bool, device=device)
        self.state = [self.token, self.position, self.column, self.mask, self.ended]
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _read(self, model, ids, mask, positions, columns) -> torch.Tensor:
        """Read tokens `[B, T]` into columns `[T]` of the cache; logits `[B, V]` of the next one."""
        for layer in self.cache.layers:
            layer.columns, layer.reads = columns, mask.size(-1)
        return last_logits(model, ids, mask, positions, self.cache)

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Tokens `[B, 1]`: the largest of log p + Gumbel noise is a draw from p."""
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log_()
        return (logits.float() / self.temperature - noise).argmax(-1, keepdim=True)

    def _forward(self, model, ids, mask, positions, columns) -> None:
        """Read tokens, then draw the next one of each row into `token`."""
        with self.autocast():
            logits = self._read(model, ids, mask, positions, columns)
        drawn = self._draw(logits)
        self.token.copy_(torch.where(self.ended, self.pad, drawn))
        self.ended |= (drawn == self.ends).any(-1, keepdim=True)

    def _step(self, reads: int) -> None:
        """One token for every row, which reads so many columns of the cache."""
        self.mask.index_fill_(3, self.column, 0)
        self._forward(self.one_token, self.token, self.mask[..., :reads], self.position, self.column)
        self.column += 1
        self.position += 1

    def _captured(self, reads: int) -> torch.cuda.CUDAGraph:
        before = [tensor.clone() for tensor in self.state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        # What the trial draws is drawn again.
        with torch.cuda.stream(side), torch.random.fork_rng([self.token.device]):
            self._step(reads)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Never replayed at the same time, so they can have their memory in common.
        with torch.cuda.graph(graph, pool=next((other.pool() for other in self.graphs.values()), None)):
            self._step(reads)
        # What the trial wrote behind the prompt is written over.
        for tensor, value in zip(self.state, before, strict=True):
            tensor.copy_(value)
        return graph

    def sample(self, ids: torch.Tensor, attention_mask: torch.Tensor, count: int) -> torch.Tensor:
        """Prompts and up to `count` new tokens of each row; a row without a prompt gets padding alone."""
        width = ids.size(1)
        seen = attention_mask.bool()
        self.ended.copy_(~seen.any(1, keepdim=True))
        self.column.fill_(width)
        self.mask.fill_(-torch.inf)
        self.mask[:, 0, 0, :width].masked_fill_(seen, 0)
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        self.position.copy_(positions[:, -1:] + 1)
        # In whole rounds, for kernels of attention want their masks aligned.
        reads = min(self.length, cache_length(width))
        later = torch.ones(width, reads, dtype=torch.bool, device=ids.device).triu(1)
        # A padded place sees itself, or its row would have nothing to take a softmax of.
        own = torch.eye(width, reads, dtype=torch.bool, device=ids.device)
        mask = self.mask[..., :reads].masked_fill(later, -torch.inf).masked_fill(own, 0)
        self._forward(self.model, ids, mask, positions, torch.arange(width, device=ids.device))
        drawn = [self.token.clone()]
        while len(drawn) < count:
            if len(drawn) % _LOOK == 0 and self.ended.all():
                break
            filled = width + len(drawn)
            reads = min(self.length, -(-filled // self.part) * self.part)
            if ids.is_cuda and reads not in self.graphs:
                self.graphs[reads] = self._captured(reads)
            self.graphs[reads].replay() if ids.is_cuda else self._step(reads)
            drawn.append(self.token.clone())
        return torch.cat([ids, *drawn], dim=1)
