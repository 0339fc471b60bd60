"""A project of a language model in threads, on real TLS streams: owner and dealer stand."""

import contextlib
import threading
from dataclasses import replace
from functools import partial

import torch

from benchmarks.emulation import TcpProxy
from vfl.llm.file import read_llm_file
from vfl.llm.parties import Dealer, Owner, User
from vfl.llm.project import free_addresses, write_llm_project
from vfl.models.decoder import Decoder, DecoderShape
from vfl.models.pretrained import load_pretrained, save_decoder

SMALL = DecoderShape(vocabulary=64, width=32, layers=1, heads=2, context=32, tied=False)


class Over(Exception):
    """The test is."""


def small_model(**changes):
    """A decoder whose answers are not one token again and again."""
    torch.manual_seed(0)
    model = Decoder(replace(SMALL, **({"head_width": 0} | changes)))  # follows the width
    for weight in model.parameters():
        weight.data.mul_(3)
    return model.eval()


class LlmParties:
    """The folders of a project, and its standing parties while they stand.

    Attributes:
        said: output of each party, by name.
    """

    def __init__(self, root, model=None, folder=None, **options):
        self.folder = root / "project"
        self.model = load_pretrained(folder) if folder else model or small_model()
        if folder is None:
            folder = root / "model"
            save_decoder(folder, self.model)
        self.owner, self.dealer = free_addresses(2)
        write_llm_project(
            self.folder,
            self.model.shape,
            folder,
            owner=self.owner,
            dealer=self.dealer,
            **options,
        )
        self.said = {name: [] for name in ("owner", "user", "dealer")}
        self._standing = {}

    def file(self, name, **changes):
        """A party's own file, with some settings changed."""
        file = read_llm_file(self.folder / name)
        changed = file.model_copy(update={"rejoin_s": 1.0, "patience_s": 20.0} | changes)
        changed._path = file._path
        return changed

    def user(self, **changes):
        """The user; it calls who stands."""
        return User(self.file("user", **changes), self.said["user"].append)

    def start(self, *names, **changes):
        """Let parties stand, each in a thread."""
        for name in names:
            say, file = self.said[name].append, self.file(name, **changes)
            if name == "owner":
                party = Owner(file, partial(load_pretrained, file.beside(file.model)), say)
            else:
                party = Dealer(file, say)
            over = threading.Event()

            def poll(over=over):
                if over.is_set():
                    raise Over

            def play(party=party, poll=poll):
                with contextlib.suppress(Over):
                    party.serve(poll)

            before = len(self.said[name])
            thread = threading.Thread(target=play)
            thread.start()
            self._standing[name] = (over, thread)
            while not any("listens" in line for line in self.said[name][before:]):
                assert thread.is_alive()
                thread.join(0.02)
        return self

    def end(self, *names):
        """Let parties go."""
        for name in names or tuple(self._standing):
            over, thread = self._standing.pop(name)
            over.set()
            thread.join(60)
            assert not thread.is_alive()

    def line(self, name, wan=None):
        """A line to a standing party that can be cut, slowed and counted; see `TcpProxy`."""
        host, _, port = getattr(self, name).rpartition(":")
        return TcpProxy((host, int(port)), wan)
