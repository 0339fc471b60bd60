"""Several processes of one party: what they compute together, and how they start and meet.

`group` shares a batch's rows and sums gradients; `processes` starts ranks on this machine;
`machines` lets ranks on other machines join.
"""
