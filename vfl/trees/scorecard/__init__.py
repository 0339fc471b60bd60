"""Credit scorecards over columns of several organisations.

mode:       `model = "scorecard"`: options, refused settings and privacy guarantees
ends:       both parties' code: fine bins go to the label party, merged bins and points come back
shared:     the same on additive shares; the label party learns only sums over rows
fitting:    fit of a scorecard from counts and sums
binning:    merge of fine bins into few bins that separate good from bad rows
statistics: weight of evidence, information value, correlation, variance inflation
points:     conversion of log odds to points
card:       statistics of a column's bins, and the whole scorecard
loaded:     a finished scorecard with names and edges, from its run's folder
page:       the scorecard's page and plain text
command:    `vfl bins` and `vfl scorecard`
"""
