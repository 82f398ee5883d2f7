"""How alike two pictures are, by their pixels: pure arithmetic that stands in for CLIP where no CLIP weights are.

None of it knows what a picture shows. With the same weights, seed and steps two engines should make nearly the same
pixels, and that is what it tells; whether two different pictures show the same thing, it cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Pixels: TypeAlias = npt.NDArray[np.float64]
"""Rows x columns x 3, from 0 to 1."""

_LUMA: Final = np.array([0.2126, 0.7152, 0.0722])
_WINDOW: Final = 8
# The constants of SSIM (Wang et al., 2004) for a range of 1.
_C1, _C2 = 0.01**2, 0.03**2


@dataclass(frozen=True, slots=True)
class Likeness:
    """How a candidate compares with its reference.

    `structure`: SSIM of brightness, 1 for the same picture. `colour`: shared part of the colour histograms, 0 to 1.
    `entropy_drift`: bits of the candidate's brightness less the reference's. `sharpness`, `colourfulness`: candidate over reference.
    """

    structure: float
    colour: float
    entropy_drift: float
    sharpness: float
    colourfulness: float


def compare(reference: Pixels, candidate: Pixels) -> Likeness:
    """Compare two pictures of one size; ValueError for two sizes."""
    if reference.shape != candidate.shape:
        raise ValueError(f"{reference.shape} and {candidate.shape} cannot be compared")
    return Likeness(
        structure=structure(luma(reference), luma(candidate)),
        colour=shared_colours(reference, candidate),
        entropy_drift=entropy(candidate) - entropy(reference),
        sharpness=_over(sharpness(candidate), sharpness(reference)),
        colourfulness=_over(colourfulness(candidate), colourfulness(reference)),
    )


def luma(pixels: Pixels) -> Pixels:
    """Return the brightness of each pixel (ITU-R BT.709)."""
    found: Pixels = pixels @ _LUMA
    return found


def entropy(pixels: Pixels) -> float:
    """Return Shannon's entropy of the brightness, bits: 0 for one flat tone, 8 at most."""
    counts, _ = np.histogram(luma(pixels), bins=256, range=(0, 1))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def structure(one: Pixels, other: Pixels) -> float:
    """Return the mean SSIM of two brightness planes, over windows that do not overlap."""
    first, second = _windows(one), _windows(other)
    mean_1, mean_2 = first.mean(1), second.mean(1)
    shared = ((first - mean_1[:, None]) * (second - mean_2[:, None])).mean(1)
    above = (2 * mean_1 * mean_2 + _C1) * (2 * shared + _C2)
    below = (mean_1**2 + mean_2**2 + _C1) * (first.var(1) + second.var(1) + _C2)
    return float((above / below).mean())


def _windows(plane: Pixels) -> Pixels:
    """Return the whole windows of a plane, one a row; a plane smaller than a window is one window."""
    rows, columns = (each // _WINDOW * _WINDOW for each in plane.shape)
    if not rows or not columns:
        return plane.reshape(1, -1)
    cut = plane[:rows, :columns].reshape(rows // _WINDOW, _WINDOW, columns // _WINDOW, _WINDOW)
    return cut.swapaxes(1, 2).reshape(-1, _WINDOW * _WINDOW)


def shared_colours(one: Pixels, other: Pixels) -> float:
    """Return how much two colour histograms (8 steps each of red, green, blue) have in common, 0 to 1."""
    shares = []
    for pixels in (one, other):
        counts, _ = np.histogramdd(pixels.reshape(-1, 3), bins=(8, 8, 8), range=((0, 1),) * 3)
        shares.append(counts / counts.sum())
    return float(np.minimum(*shares).sum())


def sharpness(pixels: Pixels) -> float:
    """Return the variance of the Laplacian of the brightness."""
    plane = luma(pixels)
    if min(plane.shape) < 3:
        return 0.0
    edges = plane[:-2, 1:-1] + plane[2:, 1:-1] + plane[1:-1, :-2] + plane[1:-1, 2:] - 4 * plane[1:-1, 1:-1]
    return float(edges.var())


def colourfulness(pixels: Pixels) -> float:
    """Return the colourfulness by Hasler and Suesstrunk (2003), for a range of 1."""
    red, green, blue = np.moveaxis(pixels, 2, 0)
    first, second = red - green, (red + green) / 2 - blue
    return float(np.hypot(first.std(), second.std()) + 0.3 * np.hypot(first.mean(), second.mean()))


def _over(candidate: float, reference: float) -> float:
    if reference == candidate:
        return 1.0
    return candidate / reference if reference else float("inf")
