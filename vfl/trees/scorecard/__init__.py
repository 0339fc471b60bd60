"""Scorecards over columns of several organisations.

mode:        `model = "scorecard"`: its terms, refusals and guarantees ends:        both parties'
parts of a session: fine bins up, merged bins and points down shared:      parts of a training on
shares, in which the label party learns only sums fitting:     fit of a card from counts and sums of
any source binning:     merge of fine bins into few bins that predict the label, only from counts
statistics: weight of evidence, information value, correlation, inflation, separation of scores
points: conversion of log odds to points of a scale card:        statistics of a column's bins, and
the whole card
"""
