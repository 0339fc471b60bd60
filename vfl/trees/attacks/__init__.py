"""Attacks on boosted trees: general attacks on trees as networks, and attacks only for trees.

cases:   an attacker's knowledge in a run: the forest as a bottom model, bins of cells and
         directions of rows at splits as cuts
columns: conversion of a party's cells to numbers that attacks read
splits:  label inference from the splits on the attacker's own columns
nodes:   label inference from the tree nodes of training rows
bins:    feature reconstruction from the bins that a label party received
sums:    feature reconstruction from sums over bins, without received bins
"""
