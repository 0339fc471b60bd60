"""Whole sessions over real streams, for which a stand-in plays Flower's part."""

import copy
import shutil
import warnings
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
from stand_in_flower import Envelope, Flower

from vfl.config import Experiment, read_party_file
from vfl.core.errors import PeerFailedError, ProtocolError
from vfl.core.traffic import Ledger
from vfl.session.store.identity import Identity
from vfl.session.store.party_folder import own_terms
from vfl.session.terms import AlignTerms
from vfl.transport import HubLink

with warnings.catch_warnings():  # importing Flower uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from vfl.server.session import run_session


class Noting(Ledger):
    """What the label party's links see, whole."""

    seen: ClassVar = []
    #: Kind and step of the frame at which a label party that is not honest breaks off.
    enough: ClassVar = None

    def __call__(self, party, direction, frame):
        super().__call__(party, direction, frame)
        self.seen.append((party, direction, frame.kind, frame.step, bytes(frame.payload)))
        if self.enough and frame.kind is self.enough[0] and frame.step >= self.enough[1]:
            raise ProtocolError("the label party has seen enough")


def stand_in(monkeypatch):
    """Put the stand-ins where the label party looks for Flower and for its ledger."""
    for room in ("session", "alignment"):
        monkeypatch.setattr(f"vfl.server.{room}._COLLECT_S", 0.0)
    monkeypatch.setattr("vfl.server.federation.Message", Envelope)
    monkeypatch.setattr("vfl.server.session.Ledger", Noting)
    monkeypatch.setattr("vfl.transport.hub._TICK_S", 0.005)  # parties connect in milliseconds


def note_limits(monkeypatch):
    """What each of the hub's links last agreed on, by party."""
    agreed, agree = {}, HubLink.agree

    def noting(link, limits):
        agreed[link.party] = limits
        agree(link, limits)

    monkeypatch.setattr(HubLink, "agree", noting)
    return agreed


def largest(seen):
    """The largest payload that crossed, by party, direction and kind."""
    sizes = {}
    for party, way, kind, _, payload in seen:
        sizes[party, way, kind] = max(len(payload), sizes.get((party, way, kind), 0))
    return sizes


#: A party's own file.
PARTY = """\
party = "{name}"
[data]
source = "data.csv"
id = "id"
{more}
"""


class PlayedSession:
    """Folders of several parties, a lender's among them, and a way to play a session."""

    def __init__(self, folder, flower, content):
        self.folder, self.flower, self._content = folder, flower, content
        self.alignments = 0

    def write(self, name, text):
        """A party's file."""
        path = self.folder / name / "party.toml"
        path.write_text(text)
        self.flower.files[name] = read_party_file(path)

    def copied_to(self, folder):
        """The same parties, and all that they keep, in another folder."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        other = copy.copy(self)
        other.folder, other.flower = folder, Flower(self.flower.parties, tells=self.flower.tells)
        for name in self.flower.files:
            other.flower.files[name] = read_party_file(folder / name / "party.toml")
        return other

    def forget_store(self, name):
        """A party deletes its store, but not the count of it: that is how one would lie."""
        store = self.folder / name / "store"
        counts = store / "sessions" / "witness"
        kept = {path.name: path.read_bytes() for path in counts.glob("*.json")}
        shutil.rmtree(store)
        for file, content in kept.items():
            counts.mkdir(parents=True, exist_ok=True)
            (counts / file).write_bytes(content)

    def introduce(self, *names):
        """Parties have identity keys and each other's public ones."""
        for name in names:
            identity = Identity.fresh()
            identity.keep_at(self.folder / name / "identity.key")
            for other in set(names) - {name}:
                identity.public.keep_at(self.folder / other / "peers" / f"{name}.pub")

    def experiment(self, **changes):
        """What is played, with some settings changed."""
        return Experiment.model_validate(self._content | changes)

    def play(
        self, mode="train", *, run="run", resume=False, enough=None, told=(), today=None, **changes
    ):
        """What the label party's links saw of a session, submitted with what is `told`.

        `today` are the feature parties that the project has by now; None where none has left.
        """
        Noting.seen, Noting.enough = [], enough
        earlier = len(self.flower.threads)  # of a session that may serve meanwhile
        experiment = self.experiment(**changes)
        lender = self.flower.files["lender"]
        if mode == "align":
            self.alignments += 1
            terms = AlignTerms.asked(experiment, f"aligned-{self.alignments}")
        else:
            terms = own_terms(experiment, mode, run, lender).asked_with(told)
        try:
            run_session(self.flower, experiment, lender, terms, resume=resume, today=today)
        finally:
            for thread in self.flower.threads[earlier:]:
                thread.join(timeout=60)
        return Noting.seen

    def refusal(self, code="V403", **how):
        """The one error of this code at a feature party, of a session that ends with it."""
        with pytest.raises(PeerFailedError, match=rf"{code}|does not consent"):
            self.play(**how)
        (refusal,) = [error for error in self.flower.failures if error.code == code]
        return refusal

    def write_tables(self, parties):
        """Tables of 120 rows: two columns of each feature party, and the lender's labels."""
        draw = np.random.default_rng(0)
        for name in (*parties, "lender"):
            (self.folder / name).mkdir()
            columns = {"a": draw.normal(size=120), "b": draw.normal(size=120)}
            if name == "lender":
                columns = {"paid": np.arange(120) % 2}
            table = pd.DataFrame({"id": [f"r{row:03}" for row in range(120)], **columns})
            table.to_csv(self.folder / name / "data.csv", index=False)
            self.write(name, 'label = "paid"' if name == "lender" else "")

    @property
    def run(self):
        return self.folder / "lender" / "store" / "runs" / "run"
