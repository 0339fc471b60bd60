"""Alignment: bring the rows of several parties into one order by their ids.

`join` does it where one process has all tables. Where the ids must stay with their owners, `ids`
normalises them, a protocol finds the common ones (`protocols`, over `ristretto` or with a helper),
and each party stores the positions of its own rows (`positions`).
"""
