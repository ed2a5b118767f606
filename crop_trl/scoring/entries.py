"""Logits of a few vocabulary entries and the sum of all the others, in tiles, with gradient: what a loss over the
teacher's top K reads of the student."""

import torch

from .topk import head_logits

# Positions and vocabulary entries of a tile.
_ROWS, _COLUMNS = 4096, 32768
# Stands for a logit, or a log-probability, that there is not: exp of it is 0, and unlike infinity it keeps 0 * x a 0.
ABSENT = -1e30


def _accumulate(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`total += a @ b` in fp32, without rounding the product to a coarser type first."""
    if a.device.type == "cuda" and a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


class EntriesInTiles(torch.autograd.Function):
    """Of logits `[N, V]` that never exist as a whole: those of `targets [N]` and `ids [N, K]`, the log of the summed
    exponentials of all but `ids`, and the mean logit under the softmax of these (without gradient).

    The rest is summed and not what is left over 1: where the K entries hold nearly everything, the difference would be
    rounding. An id beyond the head counts as [`ABSENT`]."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, ids, softcap, scale):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        asked = torch.cat([targets[:, None], ids], dim=1).long()
        ctx.settings = dtype, softcap, scale
        values = torch.full(asked.shape, ABSENT, dtype=torch.float32, device=hidden.device)
        rest = torch.full((len(hidden),), ABSENT, dtype=torch.float32, device=hidden.device)
        mean = torch.zeros_like(rest)
        for rows, _columns, z, slots, inside in EntriesInTiles._tiles(ctx, hidden, weight, bias, asked):
            values[rows] = torch.where(inside, z.gather(1, slots), values[rows])
            EntriesInTiles._leave_out(z, slots, inside)
            more = z.logsumexp(1)
            total = torch.logaddexp(rest[rows], more)
            of_tile = (z.softmax(1) * z).sum(1)
            mean[rows] = mean[rows] * (rest[rows] - total).exp() + of_tile * (more - total).exp()
            rest[rows] = total
        ctx.save_for_backward(hidden, weight, bias, asked, rest)
        ctx.mark_non_differentiable(mean)
        return values[:, 0], values[:, 1:], rest, mean

    @staticmethod
    def backward(ctx, of_targets, of_ids, of_rest, _):
        hidden, weight, bias, asked, rest = ctx.saved_tensors
        dtype, softcap, scale = ctx.settings
        given = torch.cat([of_targets[:, None], of_ids], dim=1)
        wanted = (hidden, weight, bias)
        grads = [
            torch.zeros_like(of, dtype=torch.float32) if need else None
            for of, need in zip(wanted, ctx.needs_input_grad)
        ]
        for rows, columns, z, slots, inside in EntriesInTiles._tiles(ctx, hidden, weight, bias, asked):
            slope = scale if softcap is None else scale * (1 - (z / softcap).square())
            EntriesInTiles._leave_out(z, slots, inside)
            grad = z.sub_(rest[rows, None]).exp_().mul_(of_rest[rows, None])
            grad.scatter_add_(1, slots, given[rows] * inside)
            grad = grad.mul_(slope).to(dtype)
            if grads[0] is not None:
                _accumulate(grads[0][rows], grad, weight[columns].to(dtype))
            if grads[1] is not None:
                _accumulate(grads[1][columns], grad.t(), hidden[rows].to(dtype))
            if grads[2] is not None:
                grads[2][columns] += grad.sum(0, dtype=torch.float32)
        return *(None if grad is None else grad.to(of.dtype) for grad, of in zip(grads, wanted)), *[None] * 4

    @staticmethod
    def _tiles(ctx, hidden, weight, bias, asked):
        """Logits of each tile, where in it the entries are that are asked for, and whether they are."""
        dtype, softcap, scale = ctx.settings
        for top in range(0, len(hidden), _ROWS):
            rows = slice(top, top + _ROWS)
            for left in range(0, len(weight), _COLUMNS):
                columns = slice(left, left + _COLUMNS)
                part = None if bias is None else bias[columns]
                z = head_logits(hidden[rows].to(dtype), weight[columns].to(dtype), part, softcap, scale, True)
                slots = asked[rows] - left
                inside = (slots >= 0) & (slots < z.size(1))
                yield rows, columns, z, slots.clamp(0, z.size(1) - 1), inside

    @staticmethod
    def _leave_out(z, slots, inside):
        """Take the K entries out of a tile, in place; slots of entries of other tiles stay as they are."""
        lowest = torch.where(inside, ABSENT, float("inf"))
        z.scatter_reduce_(1, slots[:, 1:], lowest[:, 1:], "amin")
