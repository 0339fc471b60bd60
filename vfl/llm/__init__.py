"""Private questions to a transformer: the owner sees no text, and the user no weights.

Chapter 6 of the thesis of split learning (2025), from bottom to top:

    two_party        protocols of two parties online and a dealer ahead, with `material` on disk
    private_decoder  a transformer by these protocols; the three parties in one process
    pretrained       weights of others; text is the user's
    parties          the three as processes, by TLS; file and project are what each has on its disk
    command          ``vfl llm``
    attack           what the permuted values give away
"""
