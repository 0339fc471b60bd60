"""Several processes (ranks) of one party: their collective operations, start and connections.

`group` divides a batch's rows among the ranks and sums their gradients; `processes` starts ranks on
this machine; `machines` lets ranks on other machines join.
"""
