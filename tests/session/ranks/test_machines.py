"""Further ranks: what machines sum up over their streams, who is let in, who is said to be lost."""

import sys
import threading

import pytest
import torch

from vfl.config import read_party_file
from vfl.core.errors import (
    AuthenticationError,
    DataError,
    LostPeerError,
    LostRankError,
    MissingDataError,
    PeerFailedError,
)
from vfl.core.frame import Frame, Kind
from vfl.core.version import VERSION
from vfl.session.ranks import machines as machines_module
from vfl.session.ranks import processes
from vfl.session.ranks.machines import RankMachines, RanksKey, StreamGroup
from vfl.session.ranks.processes import RankProcesses
from vfl.transport import Hello, TcpLink, Timeouts, local_pair, session_certificate

PATIENCE = Timeouts(connect_s=2.0, handshake_s=2.0, rejoin_window_s=0.0)


@pytest.fixture
def party(tmp_path):
    return written(tmp_path)


def written(folder, key="ab" * 32, mode=0o600):
    (folder / "party.toml").write_text(
        'party = "bank"\n[data]\nsource = "data.csv"\nid = "id"\n[node]\nranks_at = "127.0.0.1:0"\n'
    )
    (folder / "ranks.key").write_text(key)
    (folder / "ranks.key").chmod(mode)
    return read_party_file(folder / "party.toml")


def ranks(size):
    """Groups of so many ranks; the streams are queues."""
    pairs = {rank: local_pair() for rank in range(1, size)}
    there = {rank: threading.Semaphore(0) for rank in range(1, size)}
    back = {rank: threading.Semaphore(0) for rank in range(1, size)}

    def group(own):
        """Rank 0 has a queue to each of the others, which have one to it."""
        end, comes, leaves = (1, back, there) if own else (0, there, back)

        def take(rank):
            assert comes[own or rank].acquire(timeout=10)
            return pairs[own or rank][end].receive()

        def give(rank, frame):
            pairs[own or rank][end].send(frame)
            leaves[own or rank].release()

        return StreamGroup(own, size, take, give)

    return list(map(group, range(size)))


def everywhere(groups, play):
    found = [None] * len(groups)

    def one(rank):
        found[rank] = play(rank, groups[rank])

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_has_the_same_sums_and_parts(size):
    parts = [torch.randn(7, 3, generator=torch.Generator().manual_seed(r)) for r in range(size)]

    def play(rank, group):
        total, counts, first = parts[rank].clone(), torch.tensor([rank, 1]), parts[rank].clone()
        group.add_up(total)
        group.add_up(counts)
        gathered = group.gather(parts[rank])
        group.spread(first)
        return total, counts, gathered, first

    found = everywhere(ranks(size), play)
    for total, counts, gathered, first in found:
        torch.testing.assert_close(total, torch.stack(parts).sum(0))
        assert torch.equal(total, found[0][0])
        assert counts.tolist() == [size * (size - 1) // 2, size]
        assert all(map(torch.equal, gathered, parts))
        assert torch.equal(first, parts[0])


def knock(port, key, rank=1, token=None, ca_pem=None):
    hello = Hello(f"ranks of {key.party}", f"rank {rank}", token or key.token(rank),
                  {"version": VERSION})  # fmt: skip
    authority = ca_pem or key.authority.ca_pem
    return TcpLink.connect("127.0.0.1", port, hello, authority, PATIENCE, peer="rank 0")


def test_who_has_another_key_shows_no_token_and_gets_no_order(party):
    own, others = RanksKey.of(party), RanksKey("bank", bytes(32))
    with RankMachines(party, 2, 1.0) as machines:
        port = machines._hub.port
        with pytest.raises(AuthenticationError, match="certificate is not trusted"):
            knock(port, others)
        strange = session_certificate(["127.0.0.1"]).ca_pem
        with pytest.raises(AuthenticationError, match="certificate is not trusted"):
            knock(port, own, ca_pem=strange)
        with pytest.raises(AuthenticationError, match="has no such session"):
            knock(port, own, token=others.token(1))
        with pytest.raises(AuthenticationError, match="has no such session"):
            knock(port, own, token=own.token(2))
        with pytest.raises(LostRankError, match="rank 1 of party 'bank' was lost") as caught:
            machines.start(1, {"side": "feature"})
    assert "--rank 1" in caught.value.fix


def test_one_process_a_rank_gets_the_order_and_no_second_one_does(party):
    own = RanksKey.of(party)
    with RankMachines(party, 2, 5.0) as machines:
        link = knock(machines._hub.port, own)
        machines.start(1, {"side": "feature"})
        order = link.receive()
        assert (order.kind, b'"side": "feature"' in bytes(order.payload)) == (Kind.PROTOCOL, True)
        with pytest.raises(AuthenticationError):
            knock(machines._hub.port, own)
        link.send(Frame(Kind.PROTOCOL, payload=b'{"port": 7}'))
        assert machines.receive(1) == {"port": 7}
    assert link.receive().kind is Kind.DONE
    link.close()


def test_keys_of_other_parties_and_ranks_are_others():
    one, other = RanksKey("bank", bytes(32)), RanksKey("lender", bytes(32))
    assert len({one.token(1), one.token(2), other.token(1)}) == 3
    assert one.authority.key_pem == one.authority.key_pem != other.authority.key_pem
    assert bytes(32).hex() not in repr(one)


@pytest.mark.parametrize(
    ("key", "mode", "error"),
    [("ab" * 32, 0o644, DataError), ("ab" * 31, 0o600, DataError), ("short", 0o600, DataError)],
)
def test_a_key_that_others_can_read_or_guess_is_refused(tmp_path, key, mode, error):
    with pytest.raises(error) as caught:
        RanksKey.of(written(tmp_path, key, mode))
    assert key not in str(caught.value)


def test_a_key_that_is_missing_says_how_to_make_one(party):
    party.beside("ranks.key").unlink()
    with pytest.raises(MissingDataError) as caught:
        RanksKey.of(party)
    assert "openssl rand -hex 32" in caught.value.fix


#: A rank of this machine, which ends as its order says.
RANK = """
import json, os, sys
order = json.loads(sys.stdin.readline())
if order["failure"]:
    print(json.dumps({"failure": order["failure"]}), flush=True)
    sys.exit(1)
if order["dies"]:
    os.kill(os.getpid(), 9)
sys.stdin.read()
"""
MISSED = LostPeerError("party 'shop' disconnected and did not reconnect")
OURS, THEIRS = (f"rank 1 of party '{name}' was lost" for name in ("bank", "shop"))


class Stream:
    """Rank 0's stream to another party; that one says at the third look why it ended, if at all."""

    patience_s = 60.0

    def __init__(self, ends_with=None):
        self.ends_with, self.looks = ends_with, 0

    def poll(self):
        self.looks += 1
        if self.looks >= 3 and self.ends_with is not None:
            raise self.ends_with

    def fileno(self):
        return -1


def said(code, what):
    """What a party ended with, as rank 0 receives it."""
    error = PeerFailedError(f"party 'shop' stopped with {code}: {what}")
    error.peer_code, error.peer_what = code, what
    return error


@pytest.fixture(params=["processes", "machines"])
def begun(request, party, monkeypatch):
    """Rank 0 of a bank with a stream to a shop, and rank 1, which dies, misses it, or waits."""
    monkeypatch.setattr(machines_module, "_REJOIN_S", 0.1)
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-S", "-c", RANK))
    links = []

    def begin(rank, stream, wait):
        one_machine = request.param == "processes"
        with RankProcesses("bank", 2, 30.0) if one_machine else RankMachines(party, 2, 30.0) as own:
            watched = own.watch(stream, "party 'shop'")
            if one_machine:
                failure = MISSED.record() if rank == "misses" else None
                own.start(1, {"failure": failure, "dies": rank == "dies"})
            else:
                links.append(knock(own._hub.port, RanksKey.of(party)))
                own.start(1, {})
                if rank == "misses":
                    links[0].fail(MISSED)
                if rank == "dies":
                    links[0].close()
            wait(own, watched)

    yield begin
    for link in links:
        link.close()


def test_a_rank_that_dies_is_noticed_while_another_party_is_waited_for(begun):
    with pytest.raises(LostRankError, match=OURS):
        begun("dies", Stream(), lambda ranks, stream: stream.receive())


def test_a_party_that_ends_is_noticed_while_a_rank_is_waited_for(begun):
    """The rank may wait for that party, too, for as long as parties may take to come."""
    with pytest.raises(PeerFailedError, match=THEIRS):
        begun(
            "waits",
            Stream(said(LostRankError.code, THEIRS)),
            lambda ranks, stream: ranks.receive(1),
        )


def until_it_ends(ranks, stream):
    """Look at the rank until it has ended; the party has not said anything yet."""
    while True:
        ranks.check()
        stream._link.looks = 0


def test_a_rank_misses_a_party_before_the_party_says_that_it_lost_a_rank(begun):
    """What the rank noticed would begin the training anew, and wait for a rank that is lost."""
    with pytest.raises(PeerFailedError, match=THEIRS):
        begun("misses", Stream(said(LostRankError.code, THEIRS)), until_it_ends)


@pytest.mark.parametrize("says", [None, said(LostPeerError.code, "party 'bank' went away")])
def test_a_party_that_only_misses_ours_has_lost_no_rank(begun, says, monkeypatch):
    """As after a cut between rank 1 here and there: the training begins anew."""
    monkeypatch.setattr(processes, "_MISSED_S", 0.3)
    with pytest.raises(LostPeerError, match="rank 1 of party 'bank' noticed"):
        begun("misses", Stream(says), until_it_ends)


def test_another_party_misses_ours_before_rank_0_does(begun):
    def hear(ranks, stream):
        raise said(LostPeerError.code, "party 'bank' went away; rank 1 of party 'shop' noticed")

    with pytest.raises(LostRankError, match=OURS):
        begun("dies", Stream(), hear)


def test_a_rank_that_ends_after_its_part_is_not_lost(monkeypatch):
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-S", "-c", "input()"))
    with RankProcesses("bank", 2, 30.0) as ranks:
        ranks.start(1, {})
        assert ranks._processes[1].wait() == 0
        ranks.check()
