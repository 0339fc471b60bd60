"""Chapter 5 of the thesis, corrected: P0 and P1 hold shares; P2 deals and sees permuted values.

The modules of this package are:

    party           operations of all parties: sharing, products, questions to P2
    thesis          mode with the printed protocol, corrected: opening and multiplication
    fast            mode with fewer bytes and messages, and with work ahead of time
    trio            a party of a mode, or all three parties in one process
    network         inference and training of fully connected networks, one program for all three
    training        the same training, exchange by exchange, as a session runs it
    private_module  conversion of a torch module to a private module: `vfl.mpc.private`
    intersection    rows that two parties have in common, without disclosing which rows these are
"""
