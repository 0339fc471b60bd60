"""A party's files on disk: its identity, its run names, its spending and its sent messages.

`party_folder` is a party's own part of a run folder, with `checkpoint`s and `run_rows`. The store
outlives runs: `session_ledger` binds names of sessions, `spending` counts epsilon, `journal`
records sent messages, `witness` lets peers notice a store restored from a copy. `identity` is a
party's lasting key pair.
"""
