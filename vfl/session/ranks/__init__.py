"""Several processes (ranks) of one party: how they start, connect and exchange tensors.

`group` divides a batch's rows among the ranks and sums their gradients; `processes` starts ranks on
this machine; `machines` lets ranks on other machines join.
"""
