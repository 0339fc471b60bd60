"""``vfl worker``: hold tensors for whoever leads, in a process of one's own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.output import say

if TYPE_CHECKING:
    from vfl.tensors import Worker


def worker(
    ticket: Annotated[
        Path, typer.Argument(metavar="TICKET", help="File that Pool.write_tickets made.")
    ],
    load: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="Numbers that are found by a name: .npy or .csv."),
    ] = None,
    epsilon: Annotated[
        float, typer.Option(help="Privacy that training with noise may spend of each; 0 is none.")
    ] = 0.0,
    delta: Annotated[float, typer.Option(help="Its delta.")] = 1e-5,
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A key that stays; made if the file is not there."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where what is spent of --epsilon outlives a worker."),
    ] = None,
    restored: Annotated[
        bool,
        typer.Option(
            "--restored", help="The store was put back from a copy: it grants nothing any more."
        ),
    ] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FINGERPRINT", help="Take no other key for this worker."),
    ] = None,
) -> None:
    """Be a worker of vfl.tensors: hold tensors, and let nobody have what `--load` brings.

    Whoever leads makes a ticket for each worker and hands it over as a secret. The worker connects,
    does what it is asked of a fixed list, and ends when the leader does. What it loads is found by
    `tensors.find(worker, NAME)`; neither that nor what is computed from it can be read elsewhere.
    With `--epsilon` a training may take gradients with noise from it, until that is spent: under
    one name of a table with `--store` for good, without it in this process alone.

    The leader passes on the public keys with which workers encrypt for each other. With `--key` a
    worker prints a fingerprint; with a `--peer` for every other worker, it detects false keys.
    """
    from vfl.core.address import Address
    from vfl.core.seeds import use_one_thread
    from vfl.tensors import Ticket, Worker, serve
    from vfl.tensors.budgets import BudgetLedger
    from vfl.tensors.keys import WorkerKeys, signing_key

    use_one_thread()
    paper = Ticket.read(ticket)
    known = dict(_named(each, "--peer takes NAME=FINGERPRINT") for each in peer or [])
    keys = WorkerKeys(paper.name, signing_key(key) if key else None, known)
    if keys.fingerprint:
        say(f"fingerprint of {paper.name}: {keys.fingerprint}")
    with ExitStack() as held:
        ledger = BudgetLedger(store, paper.name) if store else None
        if ledger is not None:
            held.enter_context(ledger.alone())
            if restored:
                ledger.restored()
        elif epsilon:
            say("what is spent of --epsilon is forgotten when this worker ends: --store keeps it")
        here = Worker(paper.name, keys, ledger)
        _load(here, load or [], epsilon, delta)
        say(f"worker {paper.name} connects to {Address(paper.host, paper.port)}")
        serve(here, paper)
    say("done")


def _load(here: Worker, load: list[str], epsilon: float, delta: float) -> None:
    """Load tables, and grant what may be spent of each."""
    import numpy as np
    import torch

    from vfl.core.errors import UserError

    for each in load:
        name, file = _named(each, "--load takes NAME=FILE")
        try:
            if file.endswith(".npy"):
                table = np.load(file, allow_pickle=False)
            else:
                table = np.loadtxt(file, delimiter=",", ndmin=2)
        except (OSError, ValueError):
            raise UserError(
                "this file cannot be loaded", where=file, want="numbers alone"
            ) from None
        here.load(torch.from_numpy(table).float(), tag=name)
        if epsilon:
            here.grant(name, epsilon=epsilon, delta=delta)


def _named(text: str, form: str) -> tuple[str, str]:
    """What stands before and behind the equals sign."""
    name, equals, rest = text.partition("=")
    if not equals:
        raise typer.BadParameter(form)
    return name, rest
