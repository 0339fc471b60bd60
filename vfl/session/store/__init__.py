"""A party's files on disk: its identity, the names of its runs, its spending, its sent messages.

The module `party_folder` reads and writes a party's own part of a run's folder, with a `checkpoint`
and `run_rows`. The store outlives runs: `session_ledger` binds names of sessions, `spending` counts
epsilon, `journal` records sent messages, `witness` lets peers notice a store restored from a copy.
The module `identity` has a party's permanent key pair.
"""
