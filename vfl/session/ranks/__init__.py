"""Several processes (ranks) of one party: their collective operations, start and connections.

`group` shares a batch's rows and sums gradients; `processes` starts ranks on this machine;
`machines` lets ranks on other machines join.
"""
