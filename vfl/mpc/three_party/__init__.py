"""Chapter 5 of the thesis, corrected: P0 and P1 hold shares; P2 deals and sees permuted values.

party           what the parties have in common: sharing, products, questions to P2
thesis, fast    the two modes: how tensors are opened and multiplied, what is dealt ahead
trio            a party of a mode, or all three in one process
network         inference and training of fully connected networks, a program for all three
training        the same exchange by exchange, as a session plays it
private_module  a torch module in, a private module out: `vfl.mpc.private`
intersection    rows that two parties share, without anybody learning which they are
"""
