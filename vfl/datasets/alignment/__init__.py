"""Alignment: bring the rows of several parties into one order by their ids.

`join` aligns tables that are all in one process. If the ids must stay with their owners, `ids`
normalises them, and a protocol finds the common ids (`protocols`, over `ristretto` or with a
helper). Each party then stores the positions of its own rows (`positions`).
"""
