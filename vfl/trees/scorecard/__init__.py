"""Scorecards over columns of several organisations.

mode         `model = "scorecard"`: what is agreed on, refused and promised
ends         both ends of a session: fine bins up, merged bins and points down
shared       ends of a training on shares, where the label party learns sums alone
fitting      from counts and sums to a card, wherever they come from
binning      fine bins merged into few that tell the label, from counts alone
statistics   weight of evidence, information value, correlation, inflation, how scores separate
points       from log odds to points of a scale
card         a column's bins with all that is known of them, and the whole card
"""
