"""Private questions to a transformer: the owner sees no text, and the user sees no weights.

The modules implement chapter 6 of the split-learning thesis (2025); the lowest layer comes first:

    two_party        protocols of two online parties and an offline dealer; `material` is on disk
    private_decoder  a transformer that uses these protocols; the three parties in one process
    text             tokens and text at the user
    parties          the three parties as processes, over TLS; `file` and `project` are on disk
    command          ``vfl llm``
    attack           attacks on the permuted values that the user sees
"""
