"""Additive shares among 2 to 8 holders, with a dealer that makes its numbers ahead of the holders.

The modules of this package are:

    members        holders in the ring 2^64: products, divisions, comparisons; and `Lockstep`
    authenticated  holders in a prime field, whose MACs expose a false share
"""
