"""The papers' tables about trees and numbers of masks as data: what is counted with the adapters that ship."""

from __future__ import annotations

RANKED = 50  # held-out answers that trees are counted on

# Candidates and probes of PPD's trees together (Figure 6.6), the root and its three probes not counted
PPD_SIZES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
BUILDERS = {
    "exact": "dynamic:{size}",
    "stripped": "stripped:{size}",
    "full": "sparse:{nodes}",
    "filled": "filled:{size}",
    "random": "random:{nodes}",
}

DECODED_SIZES = (4, 8, 16, 32, 64)  # of the thesis's trees that are decoded, too, and timed
DECODED_TREES: dict[str, dict[str, str]] = {  # by adapter: specifications by size
    "ppd": {str(size): BUILDERS["stripped"].format(size=size) for size in DECODED_SIZES},
}


def label_of(builder: str, size: int) -> str:
    """As results name one of PPD's trees."""
    return f"{builder}, size {size}"


TREES: dict[str, dict[str, str]] = {  # by adapter: specifications by label
    "bita": {
        "straightforward": "straightforward:3",
        **{f"full tree, k = {k}": f"cartesian:{k},{k},{k}" for k in (1, 2, 3, 4)},
        "efficient tree": "efficient:5",
        "efficient tree, thinning": "efficient:5,4,3",
        "1 mask": "cartesian:5",
        "2 masks": "efficient:5,5",
    },
    "space": {f"{k} mask{'s' if k > 1 else ''}": f"chain:{k}" for k in (1, 2, 3, 4, 5)},
    "ppd": {
        label_of(builder, size): spec.format(size=size, nodes=1 + size // 4)
        for builder, spec in BUILDERS.items()
        for size in PPD_SIZES
    },
}
