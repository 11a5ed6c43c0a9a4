"""Pathfinder of the Long Range Arena (Tay et al. 2021, section 2.2.5): generated, or read from published files.

Two long chains of dashes, some short ones, and two discs, in a grey image of 32 x 32 pixels: is one chain marked at
both its ends (label 1), or are both chains marked once (label 0)? Pixels are tokens, 0 to 255, in reading order.

The distribution is that of the two-snake generator of Linsley, Kim and others (github.com/drewlinsley/pathfinder,
2019) with the Long Range Arena's parameters, including its bugs: what a chain occupies is known one dash late, the
first chain's last dash is never marked as occupied, and the search for a start works only for dashes that point to the
upper left, so the first chain and all short ones begin that way, and most short ones (4 of 5 at contour 14) are
missing.
"""

from leanformer.data.sequences.pathfinder.dataset import (
    BLOCK,
    KIND,
    Block,
    Pathfinder,
    PublishedPathfinder,
    sample,
    write,
)


__all__ = ["BLOCK", "KIND", "Block", "Pathfinder", "PublishedPathfinder", "sample", "write"]
