"""A federated party's own rows and secret, from its own file."""

from __future__ import annotations

from vfl.config import PartyFile
from vfl.datasets import PartyData, TableFormat, load_for_prediction, load_own
from vfl.seeds import Secret
from vfl.session.checkpoint import CHECKPOINTS, Checkpoints
from vfl.session.ledger import Entry, SessionLedger
from vfl.session.party_folder import PartyFolder
from vfl.session.terms import Terms


def own_data(party: PartyFile, terms: Terms, task: str = "") -> PartyData:
    """The rows a session is about, as this party holds them.

    Args:
        party: the party's own file.
        terms: the session's terms; a prediction reads new rows with the encoder of the training.
        task: what the labels are for, at the label party.

    Raises:
        DataError: see `vfl.datasets.load_own`.
        RunFolderError: a prediction for a run this party has not trained.
    """
    with party.places.told(PartyFile):
        return _read(party, terms, task)


def _read(party: PartyFile, terms: Terms, task: str) -> PartyData:
    own = party.table
    form = TableFormat(own.separator, own.missing, own.id_type)
    if terms.mode == "predict":
        encoder = own_folder(party, terms).encoder()
        return load_for_prediction(party.party, party.predict_path, own.id, encoder, form)
    all_columns = ("*",) if party.party in terms.parties else ()
    return load_own(
        party.party,
        party.source_path,
        own.id,
        all_columns if own.columns is None else own.columns,
        own.label,
        task,
        terms.seed,
        terms.validation,
        terms.test,
        own.shape,
        form,
    )


#: Named by what it does: whoever knows the file's origin knows every draw.
INJECTED_SECRET = "secret-for-trials"


def own_folder(party: PartyFile, terms: Terms) -> PartyFolder:
    """The part of a run that belongs to this party."""
    return PartyFolder(party.run_path(terms.run) / "parties" / party.party)


def own_checkpoints(party: PartyFile, terms: Terms) -> Checkpoints | None:
    """Where this party saves while it trains; None for other sessions."""
    if terms.mode != "train":
        return None
    folder = own_folder(party, terms).path / CHECKPOINTS
    every = terms.train.checkpoint_every
    return Checkpoints(folder, party.party, terms.run, terms.digest(), every)


def own_ledger(party: PartyFile) -> SessionLedger:
    """The sessions this party has taken part in."""
    return SessionLedger(party.store_path / "sessions", party.party)


def own_secret(party: PartyFile, entry: Entry) -> Secret:
    """This party's secret for one name, so that no two sessions share a draw.

    It derives from the secret the operating system made at first use, and from what the party's
    ledger holds of the name: the label party can choose the name, but not the nonce. A trial can
    put a secret into the store that is taken as it is, in every run, to make runs repeatable.
    """
    injected = party.store_path / INJECTED_SECRET
    if injected.exists():
        return Secret.kept_at(injected)
    return entry.secret_from(Secret.kept_at(party.store_path / "secret"))
