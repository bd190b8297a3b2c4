"""Attention of a chunk on a CPU, in bfloat16: plain products over blocks of scores that stay in the cache.

torch's kernel for the CPU multiplies in float32 what it is given in bfloat16, unless the CPU has AMX. Here scores and
sums of values are bfloat16 products, which a CPU with instructions for them makes at twice the speed, and roundings are
those of transformers' ``eager`` attention: scores to bfloat16, softmax in float32, weights to bfloat16.

    block of queries    [ all keys that its newest may see ]   one block of scores, masked where the mask hides
    next block          [ .............................. ....]   the same memory again

Heads that share keys ask as rows of one product, and several such groups at once while their scores are few. Knows no
families and no cache.
"""

from __future__ import annotations

import torch

_LEAST_ROWS = 96  # below these two, what a call costs beside its sums is as much as what is saved
_LEAST_POSITIONS = 128
_ROWS = 384  # of a product: blocks of fewer read the keys too often
_QUERY_STEP = 16
_GROUPED = 1 << 18  # scores of several groups of heads at once, at most: half a MiB
_LARGEST = 1 << 21  # scores of a block, at most, but for the fewest queries that there are in one


def suits(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether :func:`attend_chunk` takes these and gains by it, on a CPU with instructions for bfloat16."""
    heads, count, positions = query.shape[1], query.shape[2], key.shape[2]
    few = heads // key.shape[1] * count < _LEAST_ROWS or positions < _LEAST_POSITIONS
    if few or query.dtype is not torch.bfloat16:
        return False
    if mask is None:
        return count == positions
    return mask.dtype is torch.bool and mask.shape[1:] == (1, count, positions) and count <= positions


def attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attention of the newest positions over all.

    Args:
        query: ``[batch, heads, count, width]``.
        key, value: ``[batch, key_heads, positions, ...]``; ``key_heads`` divides ``heads``.
        mask: ``[batch or 1, 1, count, positions]``, True where a query may see a position, at least one for each; None
            where each sees what does not come after it, and ``count`` is ``positions``.
        scaling: of scores.

    Returns:
        ``[batch, count, heads, value_width]``, contiguous.
    """
    batch, heads, count, width = query.shape
    groups, positions = key.shape[1:3]
    out = query.new_empty(batch, count, groups, heads // groups, value.shape[-1])
    queries = query.view(batch, groups, -1, count, width)
    scores = _Scores(heads // groups, groups, count, positions, query)
    for row in range(batch):
        seen = None if mask is None else mask[row if mask.shape[0] > 1 else 0, 0]
        scores.attend(queries[row], key[row].transpose(1, 2), value[row], seen, scaling, out[row])
    return out.flatten(2, 3)


class _Scores:
    """Room for a block of scores and one for its weights, used again by block after block.

    Args:
        sharing: heads of a group, which share keys.
        groups: of heads.
        count: queries.
        positions: keys.
        like: has the dtype.
    """

    def __init__(self, sharing: int, groups: int, count: int, positions: int, like: torch.Tensor) -> None:
        self.queries = min(count, block_queries(sharing, positions))
        each = sharing * self.queries * positions
        self.groups = max(1, min(groups, _GROUPED // each))
        self._room = like.new_empty(2, self.groups * each)
        self._nothing = like.new_zeros(())

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        seen: torch.Tensor | None,
        scaling: float,
        out: torch.Tensor,
    ) -> None:
        """One row of a batch, block by block, into ``out``.

        Args:
            query: ``[groups, sharing, count, width]``.
            key: ``[groups, width, positions]``.
            value: ``[groups, positions, value_width]``.
            seen: ``[count, positions]``; None where each sees what does not come after it.
            scaling: of scores.
            out: ``[count, groups, sharing, value_width]``.
        """
        groups, sharing, count, _ = query.shape
        hidden = torch.finfo(query.dtype).min  # to which a score adds nothing that its dtype could tell
        before = key.shape[2] - count
        # By bytes: a seventh of the time of all().
        open_to_all = before > 0 and seen is not None and bool(seen[:, :before].view(torch.uint8).min())
        closed = before if open_to_all else 0  # the first position that is hidden from any
        for start in range(0, count, self.queries):
            stop = min(count, start + self.queries)
            reach = before + stop
            if seen is None:
                closed = start
                sees = torch.ones(stop - start, stop - start, dtype=torch.bool).tril_()
            else:
                reach = key.shape[2] if bool(seen[start:stop, reach:].any()) else reach
                sees = seen[start:stop, closed:reach]
            hiding = query.new_zeros(sees.shape).masked_fill_(~sees, hidden)
            rows = query[:, :, start:stop].reshape(groups, sharing * (stop - start), -1)
            for first in range(0, groups, self.groups):
                these = slice(first, min(groups, first + self.groups))
                shape = these.stop - first, rows.shape[1], reach
                scores, weights = self._room[:, : shape[0] * shape[1] * reach].view(2, *shape)
                torch.baddbmm(self._nothing, rows[these], key[these, :, :reach], beta=0, alpha=scaling, out=scores)
                scores.view(shape[0], sharing, -1, reach)[..., closed:].add_(hiding)
                torch.softmax(scores, -1, out=weights)
                found = torch.bmm(weights, value[these, :reach]).view(shape[0], sharing, stop - start, -1)
                out[start:stop, these].copy_(found.permute(2, 0, 1, 3))


def block_queries(sharing: int, positions: int) -> int:
    """Queries of a block: enough rows for a product, as far as their scores stay in bounds."""
    wanted = -(-_ROWS // sharing)
    bounded = min(wanted, _LARGEST // (sharing * positions))
    return max(_QUERY_STEP, -(-bounded // _QUERY_STEP) * _QUERY_STEP)
