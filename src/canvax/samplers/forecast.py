"""Fewer evaluations of a table: in every second row the denoised image is forecast, not computed.

Along a run D changes smoothly with the log-SNR, so the last two evaluations predict the next (TeaCache: Liu et al.
2024, arXiv:2411.19108; TaylorSeer: Liu et al. 2025, arXiv:2503.06923; here the output of the whole network). A forecast
is linear in arrays that the loop has anyway, so a row that uses it folds into the row before: the result is a shorter
table, which every program runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from canvax.samplers.table import COLUMNS, DENOISED, NOISE, SLOTS, SamplerTable

FEWEST_STEPS = 20
"""Steps from which neighbouring rows are near enough for forecasts."""
FARTHEST = 0.4
"""Largest change of the log-SNR's half, log(alpha / std), over which D is forecast; beyond that it bends too much."""
FIRST, LAST = 3, 2
"""Rows at the beginning and at the end that are always computed."""


def with_forecasts(table: SamplerTable, changes: Sequence[int] = ()) -> SamplerTable:
    """Return the table without the rows whose D can be forecast by the line through the last two evaluations.

    No two of these rows are neighbours. Rows stay that add noise, that share a step with another row, or that have no
    two evaluations of their kind before them. One slot must be free, for the D before the last; a table without a free
    slot, or with nothing to forecast, is returned as it is.

    Args:
        table: a table with its guidance, whose end or beginning changes D at once.
        changes: steps at which other things change D at once, such as another prompt.
    """
    if not (free := free_slots(table)):
        return table
    slot, count = free[-1], len(table)
    kinds = list(zip(table.guidance == 1.0, np.searchsorted(np.sort(changes), table.step, "right"), strict=True))
    computed, folded, since = list[int](), list[np.ndarray](), 0
    with np.errstate(all="ignore"):
        level = np.log(table.sigma)
        for row in range(count):
            M = table.M[row]
            since = row if row and kinds[row] != kinds[row - 1] else since
            inner = FIRST <= row < count - LAST and computed[-1] == row - 1 and computed[-2] >= since
            alone = inner and table.step[row - 1] < table.step[row] < table.step[row + 1]
            reach = level[row] - level[row - 1]
            ahead = reach / (level[row - 1] - level[computed[-2]]) if alone else np.nan
            if np.isfinite(ahead) and abs(reach) <= FARTHEST and not M[:, NOISE].any():
                forecast = np.zeros(SLOTS + 2)  # of the state and the D of the row before
                forecast[DENOISED], forecast[slot] = 1 + ahead, -ahead
                folded[-1] = M[:, :SLOTS] @ folded[-1] + np.outer(M[:, DENOISED], forecast)
            else:
                computed.append(row)
                folded.append(M.copy())
                folded[-1][slot] = np.eye(SLOTS + 2)[DENOISED]
    if len(computed) == count:
        return table
    ends = [*(row - 1 for row in computed[1:]), count - 1]
    columns = {name: getattr(table, name)[computed] for name in COLUMNS}
    columns |= {"M": np.stack(folded), "scale": table.scale[ends], "target": table.target[ends]}
    return replace(table, **columns)


def free_slots(table: SamplerTable) -> list[int]:
    """Return the slots that no row writes, nor reads into another slot."""
    kept = np.eye(SLOTS, SLOTS + 2)
    return [
        slot
        for slot in range(1, SLOTS)
        if (table.M[:, slot] == kept[slot]).all() and not np.delete(table.M[:, :, slot], slot, axis=1).any()
    ]
