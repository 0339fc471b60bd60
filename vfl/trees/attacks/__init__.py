"""Attacks on boosted trees: kernel attacks on trees as networks, and attacks specific to trees.

cases:     attackers' knowledge in a run: a part of the trees as a bottom, bins and answers as cuts
columns:   a party's cells as numbers that attacks read splits:    label inference from the splits
on the attacker's own columns nodes:     label inference from the nodes of training rows bins:
column reconstruction from the bins that a label party received sums:      column reconstruction
from sums over bins, without received bins
"""
