"""How sequences are laid out: prompt and response in one piece, padded on the right, without an attention mask. In a
causal model nothing sees the padding, and attention keeps its fast kernels; lengths are grouped to keep it small."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# What one more forward pass costs, in tokens of a full one: kernel launches, and matrices that do not fill the GPU.
_PASS_OVERHEAD = 512


def padded_length(length: int, pad_to_multiple_of: int = 1) -> int:
    """`length`, rounded up to a multiple."""
    return -(-length // pad_to_multiple_of) * pad_to_multiple_of


def group_by_length(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Indices of batches of at most so many tokens, longest first, cut with the least padding."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    # cost[n]: cheapest way to cut the n longest; starts[n]: where its last batch begins.
    cost, starts = [0], [0]
    for stop in range(1, len(order) + 1):
        best = None
        for start in range(stop - 1, -1, -1):
            padded = lengths[order[start]] * (stop - start)
            if padded > tokens_per_batch and best is not None:
                break
            total = cost[start] + padded + _PASS_OVERHEAD
            if best is None or total < best[0]:
                best = total, start
        cost.append(best[0])
        starts.append(best[1])
    batches = []
    stop = len(order)
    while stop:
        batches.append(order[starts[stop] : stop])
        stop = starts[stop]
    return batches[::-1]


def split_balanced(lengths: Sequence[int], num_batches: int) -> list[list[int]]:
    """Indices of exactly `num_batches` batches, longest first, the largest as small as possible."""
    if len(lengths) < num_batches:
        raise ValueError(f"Cannot cut {len(lengths)} sequences into {num_batches} non-empty batches.")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def cut(cap: int) -> list[list[int]]:
        batches: list[list[int]] = []
        for position, index in enumerate(order):
            still_needed = num_batches - len(batches)
            # As many sequences left as batches to open: each must get one.
            forced = len(order) - position <= still_needed
            if not batches or forced or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > cap:
                batches.append([])
            batches[-1].append(index)
        return batches

    caps = range(lengths[order[0]], lengths[order[0]] * len(lengths) + 1)
    return cut(caps[bisect_left(caps, True, key=lambda cap: len(cut(cap)) <= num_batches)])


@dataclass
class PackedBatch:
    """Sequences ready for a forward pass, and which positions of it to project."""

    input_ids: torch.Tensor  # [R, L]
    positions: torch.Tensor  # [N + S * (E - 1)], flat index into R * L of the hidden states that predict
    targets: torch.Tensor  # response tokens that they predict; behind those the other ends, for each stop
    rows: torch.Tensor  # [N], where each belongs in [B, T], with `columns`
    columns: torch.Tensor
    stops: torch.Tensor  # [S], which of the N end a response with one of E end tokens that count as one
    num_tokens: int  # without padding
    attention_mask: torch.Tensor | None = None  # only for models that need one

    def to(self, device) -> "PackedBatch":
        """Move to a device, without waiting for the copy."""
        for name in ("input_ids", "positions", "targets", "rows", "columns", "stops", "attention_mask"):
            tensor = getattr(self, name)
            if tensor is not None:
                pinned = tensor.pin_memory() if torch.device(device).type == "cuda" else tensor
                setattr(self, name, pinned.to(device, non_blocking=True))
        return self

    def join_ends(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `[N]` of those at all positions: at a stop, of stopping with whatever end."""
        n = len(self.rows)
        if not len(self.stops):
            return logprobs
        ends = torch.cat([logprobs[self.stops, None], logprobs[n:].view(len(self.stops), -1)], dim=1)
        return logprobs[:n].index_copy(0, self.stops, ends.logsumexp(1))


def pack(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    rows: Sequence[int],
    pad_token_id: int,
    keep: torch.Tensor | None = None,
    with_attention_mask: bool = False,
    pad_to_multiple_of: int = 1,
    ends: Sequence[int] = (),
) -> PackedBatch:
    """Lay out some of the sequences, on the CPU; of their responses, `keep` `[B, T]` says what to project, by default
    all. A response whose last token is one of `ends`, two or more, has stopped there: the others are projected too.

    Lengths alone say what is padding, so a pad token that is also the EOS token is kept. Raises `ValueError` for a
    prompt without tokens, whose first response token nothing predicts."""
    lengths = [len(prompt_ids[i]) + len(completion_ids[i]) for i in rows]
    width = padded_length(max(lengths, default=0), pad_to_multiple_of)
    input_ids = torch.full((len(rows), width), pad_token_id, dtype=torch.long)
    positions, targets, row_index, columns, stops = [], [], [], [], []
    count = 0
    for r, i in enumerate(rows):
        prompt, completion = prompt_ids[i], completion_ids[i]
        if not len(prompt):
            raise ValueError(f"Prompt {i} has no tokens; give it at least one, such as the tokenizer's BOS token.")
        ids = torch.as_tensor([*prompt, *completion], dtype=torch.long)
        input_ids[r, : len(ids)] = ids
        if keep is None:
            t = torch.arange(len(completion))
        else:
            t = keep[i, : len(completion)].nonzero().squeeze(-1)
        positions.append(r * width + len(prompt) - 1 + t)
        targets.append(ids[len(prompt) + t])
        columns.append(t)
        row_index.append(torch.full_like(t, i))
        count += len(t)
        # Only there: an end within a response, as between the turns of a template, stopped nothing.
        if len(t) and t[-1] == len(completion) - 1 and completion[-1] in ends:
            stops.append(count - 1)
    none = torch.empty(0, dtype=torch.long)
    parts = (positions, targets, row_index, columns)
    positions, targets, row_index, columns = (torch.cat([*part, none]) for part in parts)
    stops, ends = torch.tensor(stops, dtype=torch.long), torch.tensor(ends, dtype=torch.long)
    stop, other = (ends != targets[stops, None]).nonzero(as_tuple=True)
    return PackedBatch(
        input_ids=input_ids,
        positions=torch.cat([positions, positions[stops[stop]]]),
        targets=torch.cat([targets, ends[other]]),
        rows=row_index,
        columns=columns,
        stops=stops,
        num_tokens=sum(lengths),
        attention_mask=(torch.arange(width) < torch.tensor(lengths)[:, None]).long() if with_attention_mask else None,
    )
