"""Several processes of one party: their common computations, and how they start and connect.

`group` shares a batch's rows and sums gradients; `processes` starts ranks on this machine;
`machines` lets ranks on other machines join.
"""
