"""Shares of 2 to 8 holders, with a dealer that finishes its work before theirs.

members        holders in the ring 2^64: products, divisions, comparisons; `Lockstep` in one
process
authenticated  holders in a prime field, whose MACs expose a false share
"""
