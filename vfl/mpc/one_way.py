"""Products with a tensor of which each holder has some columns in clear, and the dealer's share.

X = [X_0 X_1] with X_i in clear at P_i, and W = W_0 + W_1: P_0 computes X_0 W_0 alone, on the rows
of W that meet its columns. Of X_0 W_1 the factors are with two parties, so a mask each is enough
(Beaver 1991): P_0 opens E = X_0 - U, P_1 opens D = W_1 - V, and X_0 W_1 = X_0 D + E V + U V, where
P_0 computes X_0 D, P_1 knows E and V, and the dealer shares U V. The same with 0 and 1 exchanged.
So each holder multiplies what it has in clear by W_i + D, and what it knows masked by its V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.mpc.ring import Operation, inner, matmul
from vfl.mpc.shares import Shared


def add_known(z: Tensor, left: Shared, right: Shared, operation: Operation, holder: int) -> None:
    """Add to a holder's share what needs its mask and the other's opening of the left only, E V."""
    masked = right.mask()
    if operation is matmul:
        far = _rows(left, 1 - holder)
        z += matmul(left.difference(), masked if right.faced is not None else masked[far])
    else:
        z[_rows(left, 1 - holder)] += inner(left.difference(), masked)


def add_own(z: Tensor, left: Shared, right: Shared, operation: Operation, holder: int) -> None:
    """Add to a holder's share the product of what it has in clear, X_i (W_i + D)."""
    own, clear = _rows(left, holder), left.part(holder)
    if right.faced is not None:
        z += matmul(clear, right.part(1 - holder) + right.difference())
        return
    # Opened both ways: D there is the difference of the whole, so W_i + D_j is D + V_i.
    factor = right.difference() + right.mask()
    if operation is matmul:
        z += matmul(clear, factor[own])
    else:
        z[own] += inner(clear, factor)


def dealt(left: Shared, right: Shared, operation: Operation) -> Tensor:
    """What the dealer shares: each holder's mask of the left with the other's of the right."""
    (u0, u1), (v0, v1) = left.masks(), right.masks()
    if operation is inner:
        return torch.cat([inner(u0, v1), inner(u1, v0)])
    if right.faced is None:
        v0, v1 = v0[_rows(left, 1)], v1[_rows(left, 0)]
    return matmul(u0, v1) + matmul(u1, v0)


def require_factors(left: Shared, right: Shared, operation: Operation) -> None:
    """Openings must be of a kind that can be multiplied.

    Raises:
        ValueError: they are not.
    """
    known = operation is matmul or (operation is inner and right.faced is None)
    if right.owned is None and right.faced in (None, left.owned) and (left.owned is None or known):
        return
    raise ValueError("open the right factor as right.facing(left), and an owned one as the left")


def _rows(left: Shared, holder: int) -> slice:
    """Of the rows that the left's columns meet, those of a holder's."""
    return slice(left.owned, None) if holder else slice(0, left.owned)
