"""Attacks on boosted trees: the kernel's in the words of networks, and those of trees alone.

cases      what attackers of a run hold: a half of trees as a bottom, bins and answers as cuts
columns    a party's cells as numbers that attacks read
splits     labels from which of one's own columns were split, and where
nodes      labels from which training rows are in which node
bins       columns from the bins that a label party was sent
sums       columns from the sums over bins that a label party was sent instead
"""
