"""Condensation: how much the token states of a text align with depth.

Dispersion-loss paper, sections 3.1 and 3.2. For the N real tokens of a sequence, with z_i their
states after a layer, its cosines are those of all N^2 ordered pairs, a token with itself included:

    cos(z_i, z_j) = z_i . z_j / (|z_i| |z_j|),   mu = sum over i, j of cos(z_i, z_j) / N^2

The histogram and the mean mu are of these same N^2 numbers, so that tokens that have nothing in
common still put 1/N of the histogram into the last bin, and have mu = 1/N. A zero vector has
cosine 0 with all, itself included. Both are averaged over sequences, each counting alike.

B rows (sequences), T tokens, D hidden, L layers.
"""

from collections.abc import Mapping, Sequence

import torch
from scipy import stats
from torch import Tensor

from exitserve.errors import ExitServeError
from exitserve_training.losses.tokens import counted_states, unit_vectors

BINS = 100
"""Equal bins of a histogram over [-1, 1], each 0.02 wide; the last one holds 1 too."""

_BLOCK_ELEMENTS = 2**22
"""Cosines of a sequence held at once (16 MB in float32, and twice that to be counted)."""


class Condensation:
    """Collects, layer by layer, the histogram and the mean of the cosines of token pairs."""

    def __init__(self, depths: Sequence[int]) -> None:
        """Starts empty, with the L depths that will be measured."""
        self.depths = tuple(depths)
        self._histograms = {depth: torch.zeros(BINS, dtype=torch.float64) for depth in self.depths}
        self._sums = dict.fromkeys(self.depths, 0.0)
        self._sequences = dict.fromkeys(self.depths, 0)

    def add(self, depth: int, states: Tensor, mask: Tensor | None = None) -> None:
        """Adds a batch of sequences at one depth; those without a real token do not count.

        Args:
            depth: one of `depths`.
            states: [B, T, D], of any type; computed in at least float32.
            mask: bool [B, T] of real tokens; None for all. States of others may be anything.

        Raises:
            ExitServeError: a real token's state holds NaN or infinity.
        """
        clean, real = counted_states(states, mask)
        bad = int((~clean.isfinite()).any(-1).sum())
        if bad:
            raise ExitServeError(
                f"the states of {bad} of {int(real.sum())} tokens at depth {depth} hold NaN or "
                f"infinity; only finite ones can be measured. Run the model in bfloat16 or "
                f"float32 if it ran in float16."
            )
        for row, counted in zip(clean, real, strict=True):
            if counted.any():
                histogram, mean = pair_cosines(row[counted])
                self._histograms[depth] += histogram.cpu()
                self._sums[depth] += mean
                self._sequences[depth] += 1

    def histograms(self) -> Tensor:
        """Returns [L, BINS] in float64: the share of pairs in each bin; a row sums to 1."""
        return torch.stack(
            [self._histograms[depth] / max(1, self._sequences[depth]) for depth in self.depths]
        )

    def means(self) -> dict[int, float]:
        """Returns mu of each depth; 0 where no sequence counted."""
        return {depth: self._sums[depth] / max(1, self._sequences[depth]) for depth in self.depths}


def pair_cosines(states: Tensor) -> tuple[Tensor, float]:
    """Returns the share of pairs in each bin, [BINS] in float64, and the mean of their cosines.

    Args:
        states: finite [N, D] of one sequence, at least one and at least float32.
    """
    count = len(states)
    # Only zero vectors (and denormal ones) have no direction.
    units = unit_vectors(states, torch.finfo(states.dtype).tiny)
    histogram = torch.zeros(BINS, dtype=torch.float64, device=states.device)
    total = 0.0
    for block in torch.split(units, max(1, _BLOCK_ELEMENTS // count)):
        # In float64, for histc counts in the type of what it counts, and 2^24 pairs are few.
        cosines = (block @ units.T).clamp(-1.0, 1.0).double()
        histogram += torch.histc(cosines, bins=BINS, min=-1.0, max=1.0)
        total += float(cosines.sum())
    return histogram / count**2, total / count**2


def trend(means: Mapping[int, float]) -> tuple[float, float]:
    """Returns Spearman's rho and Kendall's tau (tau-b) between depth and mu (section 3.2).

    Both are 1 where mu only grows with depth (condensation), -1 where it only falls, and 0 where
    it is the same at all depths, which has no rank correlation but no trend either.

    Args:
        means: depth to mu; the paper takes the depths 1..L.
    """
    depths = sorted(means)
    values = [means[depth] for depth in depths]
    if len(set(values)) == 1:
        return 0.0, 0.0
    rho = stats.spearmanr(depths, values).statistic
    tau = stats.kendalltau(depths, values).statistic
    return float(rho), float(tau)
