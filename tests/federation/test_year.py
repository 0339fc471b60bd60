"""A year of three organisations in network namespaces: a new table a month, and what goes wrong.

What acts are commands and files that the documentation names; what they did is read through
`--json` and from files of their owners. `VFL_YEAR` is the number of months, three without it. A
year of twelve has a party that enters in month 4 and leaves in month 9, two rotations of keys, a
certificate that expires and a store that is restored from a backup; in three months nobody leaves.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import hosts as machines
import numpy as np
import pandas as pd
import pytest
from organisations import real_table
from sklearn.metrics import roc_auc_score

pytestmark = pytest.mark.net

MONTHS = int(os.environ.get("VFL_YEAR", "3"))
LENDER, OTHERS, ENTERS = "lender", ("bank", "telco"), "shop"
#: Customers of a month's table, and how many of them are new in the next one.
ROWS, NEW_ROWS = 1800, 300
LABEL = "DEFAULT_PAYMENT_NEXT_MONTH"
COLUMNS = {
    "bank": [f"BILL_AMT{month}" for month in range(1, 7)],
    "shop": [f"PAY_AMT{month}" for month in range(1, 7)],
    "telco": ["PAY_0", "PAY_2", "PAY_3", "PAY_4", "PAY_5", "PAY_6"],
    LENDER: ["LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE"],
}
ASKED, ERASED = 40, 5
#: Without rows for validation, those that a run has not trained on are the ones it is tested on.
SETTINGS = ("-s", "data.validation=0")
#: A training that loses a party is long enough to be at work then, on a fast machine as well.
LENGTH = {
    False: ("-s", "train.epochs=30"),
    True: ("-s", "train.epochs=100", "-s", "train.batch_size=16"),
}
#: When a party is killed, in turn.
KILLS = ("serving", "training", "alignment")
#: What else happens in which month.
ENTER, LEAVE, ROTATE, EXPIRE, RESTORE = "enter", "leave", "rotate", "expire", "restore"
EVENTS = {
    3: {ROTATE: "bank"},
    4: {ENTER: ENTERS},
    5: {RESTORE: "telco"},
    6: {EXPIRE: "bank"},
    7: {ROTATE: "telco"},
    9: {LEAVE: ENTERS},
}
if MONTHS < 9:
    EVENTS = {
        2: {ENTER: ENTERS, RESTORE: "telco"},
        3: {ROTATE: "bank", EXPIRE: "bank"},
    }
#: Of a certificate that nobody renews, from when on.
EXPIRES_S = 25.0
ASKING = Path(machines.REPOSITORY) / "tests" / "tools" / "asking.py"


@dataclass
class Customers:
    """Everybody who is a customer at some time of the year, in the order in which they come."""

    frame: pd.DataFrame
    erased: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, months):
        """Those who come later are younger and have smaller limits, half by chance."""
        frame, _ = real_table("credit-default")
        draw = np.random.default_rng(46)
        frame = frame.iloc[draw.permutation(len(frame))[: ROWS + months * NEW_ROWS]]
        rank = frame["LIMIT_BAL"].rank(pct=True) + draw.uniform(0, 1, len(frame))
        frame = frame.iloc[np.argsort(-rank.to_numpy())]
        return cls(frame.set_axis([f"{70_000 + row:08d}" for row in range(len(frame))]))

    def month(self, number):
        """The customers of a month."""
        return self.frame.iloc[(number - 1) * NEW_ROWS :][:ROWS]

    def table(self, party, number):
        """What a party has of them, but for who was erased; each lacks some, in its own order."""
        columns = [*COLUMNS[party], *([LABEL] if party == LENDER else [])]
        draw = np.random.default_rng([number, *party.encode()])
        rows = self.month(number)[columns]
        rows = rows.iloc[draw.permutation(len(rows))[: round(0.95 * len(rows))]]
        rows = rows.drop(index=list(self.erased & set(rows.index)))
        return rows.rename_axis("customer").reset_index()

    def common(self, number):
        """Whom all parties have in a month."""
        parties = (set(self.table(party, number)["customer"]) for party in COLUMNS)
        return set.intersection(*parties)


@dataclass
class Loss:
    """A party that was away, mostly because it was killed; seconds since 1970, as the client's."""

    party: str
    during: str
    killed_at: float
    back_at: float = np.inf


class Year:
    """The hosts, what was done there, and what the label party's service answered meanwhile."""

    def __init__(self, hosts, customers):
        self.customers = customers
        self.lender, *others = hosts
        self.others = {host.name: host for host in others}
        #: Feature parties of the project, and fingerprints that were read out.
        self.parties, self.shown = list(OTHERS), {}
        #: Who put an earlier copy of its store, and so of its log, back.
        self.restored = set()
        self.project = self.lender.folder / "project"
        self.up, self.losses = {}, []
        #: What `vfl predict` wrote of each run, by its name: the promoted one is the last.
        self.scores = {}

    def write_tables(self, month):
        """Every owner replaces its table by that of the month."""
        for host in (self.lender, *self.others.values()):
            host.write("customers.csv", self.customers.table(host.name, month).to_csv(index=False))

    def begin(self):
        """The tutorial's steps on several machines."""
        lender = self.lender
        parties = [word for name in OTHERS for word in ("--party", name)]
        self.write_tables(1)
        lender.vfl("init", "project", "--from", f"{LENDER}=customers.csv", "--label-party", LENDER,
                   "--label", LABEL, *parties, "--host", lender.address, "--serve")  # fmt: skip
        self.allow_alignments(lender, "project/label/party.toml")
        for name in self.parties:
            self.join(name)
        for name in self.parties:
            self.accept(name, LENDER, *self.parties)
        lender.start("listens on", "up", "project")
        for name in self.parties:
            self.bring(name)

    def join(self, name):
        """A party joins with the folder that it was sent, and reads out a fingerprint."""
        host = self.others[name]
        host.take(self.project / name, name)
        told = host.json("join", name, "--table", "customers.csv", "--json")
        self.shown[name] = told["fingerprint"]
        self.allow_alignments(host, f"{name}/party.toml")

    def allow_alignments(self, host, path, most=100):
        """An owner consents to the alignments of a year on the day of this test."""
        own = (host.folder / path).read_text("utf-8")
        own = re.sub(r"^max_(alignments|id_ratio) = .*\n", "", own, flags=re.MULTILINE)
        above, _, below = own.partition("\n[consent]\n")
        consent = f"\n[consent]\nmax_alignments = {most}\nmax_id_ratio = 1000.0\n"
        host.write(path, f"{above}{consent}{below}")

    def accept(self, name, *at):
        """Parties take another one's keys, whose fingerprint it has read out."""
        sent = self.others[name].folder / name / f"{name}.pub"
        for one in at:
            if one == name:
                continue
            host = self.lender if one == LENDER else self.others[one]
            folder = "project" if one == LENDER else one
            host.take(sent, f"{name}.pub")
            read_out = ("--fingerprint", self.shown[name])
            host.vfl("party", "accept", f"{name}.pub", folder, *read_out)

    def enter(self, name):
        """A party enters the project, by the steps of docs/federation.md."""
        self.lender.vfl("party", "add", name, "project", "--serve")
        self.join(name)
        self.accept(name, LENDER, *self.parties)
        for other in self.parties:
            self.accept(other, name)
        self.bring(name)
        self.parties.append(name)

    def leave(self, name):
        """A party leaves it; its command ends, and services wait until a run has no part of it."""
        self.losses.append(Loss(name, "leaving", time.time()))
        self.lender.vfl("party", "remove", name, "project")
        assert self.up[name].wait(60) == 3
        said = (self.others[name].folder / "up.said").read_text()
        assert f"error[V404]: the label party has withdrawn the key of '{name}'" in said
        self.parties.remove(name)

    def rotate(self, name):
        """A party gets a new key; its command, which runs on, takes it once it is accepted."""
        host = self.others[name]
        said = host.vfl("renew", f"{name}/party.toml")
        self.shown[name] = re.search(r"fingerprint ((?:[0-9a-f]{4} ?){8})", said)[1].strip()
        log = host.folder / "up.said"
        before = len(log.read_text())
        self.losses.append(loss := Loss(name, "rotating", time.time()))
        self.accept(name, LENDER)
        deadline = time.monotonic() + 120
        while "is connected" not in log.read_text()[before:]:
            assert time.monotonic() < deadline, log.read_text()[before:]
            assert self.up[name].poll() is None, log.read_text()[before:]
            time.sleep(0.1)
        loss.back_at = time.time()

    def expire(self, name):
        """The SuperLink's certificate expires while its authority's key lies elsewhere."""
        certificates = self.project / "label/certificates"
        renewing = "import sys; from pathlib import Path; from vfl.transport import renew_server; "
        renewing += "renew_server(Path(sys.argv[1]), float(sys.argv[2]))"
        days = EXPIRES_S / 86_400
        assert not self.lender.run(sys.executable, "-c", renewing, certificates, days).returncode
        away = self.lender.folder / "ca.key"
        (certificates / "ca.key").rename(away)
        time.sleep(EXPIRES_S + 1)
        losses = {one: Loss(one, "expired", time.time()) for one in self.parties}
        self.losses += losses.values()
        self.up[name].kill()
        self.up[name].wait()
        told = self.others[name].run(sys.executable, "-m", "vfl", "up", name)
        assert told.returncode == 3
        assert "error[V404]: the certificate of the SuperLink is not accepted" in told.stderr
        told = self.lender.run(sys.executable, "-m", "vfl", "train", "project")
        assert told.returncode == 2
        assert "error[V001]: a certificate has expired" in told.stderr
        away.rename(certificates / "ca.key")
        self.lender.vfl("renew", "project")
        for one, loss in losses.items():
            self.bring_unless_connected(one)
            loss.back_at = time.time()

    def bring_unless_connected(self, name, wait_s=120):
        """A party that met the expired certificate while it ran has ended, or is about to."""
        deadline, seen = time.monotonic() + wait_s, 0
        while seen < 3 and self.up[name].poll() is None:
            seen = seen + 1 if self.state("project")["parties"][name] else 0
            assert time.monotonic() < deadline, f"{name} is neither connected nor ended"
            time.sleep(1)
        if self.up[name].poll() is not None:
            self.bring(name)

    def back_up(self, name):
        """A party copies its store."""
        folder = self.others[name].folder
        subprocess.run(["cp", "-a", folder / name / "store", folder / "backup"], check=True)

    def restore(self, name, run):
        """A party puts an earlier copy of its store back; sessions are refused until it says so."""
        host = self.others[name]
        self.losses.append(loss := Loss(name, "restoring", time.time()))
        self.end(name)
        subprocess.run(["rm", "-r", host.folder / name / "store"], check=True)
        (host.folder / "backup").rename(host.folder / name / "store")
        self.bring(name)
        refused = self.lender.run(sys.executable, "-m", "vfl", "predict", run)
        assert refused.returncode == 3
        assert "V411" in refused.stderr
        self.end(name)
        self.restored.add(name)
        host.vfl("sessions", f"{name}/party.toml", "--restored")
        self.allow_alignments(host, f"{name}/party.toml", most=200)  # as 100 count as begun
        self.bring(name)
        loss.back_at = time.time()

    def end(self, name):
        """A party ends its command, and with it its sessions, which write a last word."""
        self.up[name].terminate()
        self.up[name].wait(60)
        time.sleep(2)

    def bring(self, name):
        """A feature party starts its command."""
        self.up[name] = self.others[name].start("is connected", "up", name)

    def lose(self, name, during, meanwhile=lambda: None):
        """A feature party's command is killed, and started again a little later."""
        self.losses.append(loss := Loss(name, during, time.time()))
        self.up[name].kill()
        self.up[name].wait()
        meanwhile()
        self.bring(name)
        loss.back_at = time.time()

    def json(self, *arguments):
        """What a command of the label party says to programs."""
        return self.lender.json(*arguments, "--json")

    def align(self, kill):
        """New positions; a first try whose party is killed ends with a coded error, or well."""
        if kill:
            trying = self.lender.start("party bank is here", "align", "project")
            self.lose("bank", "alignment")
            code, told = trying.wait(300), (self.lender.folder / "align.said").read_text()
            assert code == 0 or "error[V4" in told, told
        return self.json("align", "project")

    def train(self, *options, kill):
        """The folder of a new run, whatever happens meanwhile; and that its state is readable."""
        options = [*SETTINGS, *LENGTH[kill], *options]
        training = self.lender.start(f"epoch {2:3}", "train", "project", *options)
        said = self.lender.folder / "train.said"
        run = self.project / "label/store/runs" / said.read_text().split("ing run ")[1].split()[0]
        if kill:
            self.lose("bank", "training", lambda: self.at_work(run))
        assert training.wait(600) == 0, said.read_text()
        assert self.state(run, 0)["state"] == "ended"
        return run

    def at_work(self, run):
        """A training that has lost a party goes on, or waits for it."""
        assert self.state(run, 4)["state"] in ("training", "waiting")

    def state(self, path, code=None):
        """What `vfl status` says to programs, and that its exit code is the one it documents."""
        done = self.lender.run(sys.executable, "-m", "vfl", "status", path, "--json")
        assert code in (None, done.returncode), done.stdout + done.stderr
        return json.loads(done.stdout)

    def serve(self):
        """The label party's service, and a client that asks it all the time."""
        lender = self.lender
        self.ask_for(1)
        serve = ("serve", "project", "--probability-decimals", "off")
        self.service = lender.start("listens at", *serve)
        ready = ("--silent", "--retry", "60", "--retry-delay", "1", "--retry-all-errors", "--fail")
        lender.run("curl", *ready, "http://127.0.0.1:8080/ready")
        (token,) = (self.project / "label/store/runs").glob("*/serve.token")
        client = (sys.executable, ASKING, "http://127.0.0.1:8080", token)
        self.client = lender.start("asking", *client, "asked.txt", "answers.jsonl")

    def ask_for(self, month):
        """The client asks from now on for customers of a month who are still some in the next."""
        known = self.customers.common(month) & self.customers.common(month + 1)
        self.lender.write("asked.txt", "\n".join(sorted(known)[-ASKED:]))

    def answers(self):
        """All that the client was answered so far."""
        path = self.lender.folder / "answers.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for_answer(self, after):
        """Wait until the client is answered something that it asked after a moment."""
        deadline = time.monotonic() + 180
        while not any(one["asked"] > after and one["status"] == 200 for one in self.answers()):
            assert time.monotonic() < deadline, self.answers()[-1]
            time.sleep(0.2)

    def predictions(self, run):
        """What `vfl predict` writes now."""
        self.lender.vfl("predict", run)
        return pd.read_csv(run / "predictions.csv", dtype={"id": str}).set_index("id")

    def forget(self, name, ids):
        """An owner erases customers."""
        host = self.others[name]
        host.write("ids.txt", "\n".join(ids))
        return host.json("forget", f"{name}/party.toml", "--ids", "ids.txt", "--table", "--json")

    def log(self, name):
        """The verified log of a party, with the others' for what they met."""
        host = self.lender if name == LENDER else self.others[name]
        own = "project/label" if name == LENDER else name
        peers = []
        for other in {LENDER, *self.shown} - {name}:
            folder = (
                self.project / "label" if other == LENDER else self.others[other].folder / other
            )
            host.take(folder / "store/sessions/log.jsonl", f"{other}.jsonl")
            peers += ["--peer", f"{other}.jsonl"]
        command = (sys.executable, "-m", "vfl", "log", f"{own}/party.toml", *peers, "--json")
        return json.loads(host.run(*command).stdout)


@pytest.fixture(scope="module")
def year(data_root):
    if (reason := machines.why_not()) is not None:
        pytest.skip(reason)
    if not (data_root / "credit-default").is_dir():
        pytest.skip("there is no credit-default among the data sets")
    os.environ.setdefault("VFL_DATA", str(data_root))
    with machines.hosts(LENDER, *OTHERS, ENTERS) as made:
        done = made[0].run(sys.executable, "-c", "import torch, flwr, vfl")
        if done.returncode:
            pytest.skip(f"other users cannot use this environment: {done.stderr[-200:]}")
        yield Year(made, Customers.of(MONTHS))


def offline_auc(customers, *tables):
    """The AUC of the first table's scores on rows no run has learned from, and their number."""
    rows = sorted(set.intersection(*(set(one.index[one["trained"] == "no"]) for one in tables)))
    shown = tables[0].loc[rows]
    with np.errstate(
        divide="ignore"
    ):  # a float32 next to 1 tells few outputs apart, 1 minus it many
        scores = np.log(shown["probability_1"]) - np.log(shown["probability_0"])
    return roc_auc_score(customers.frame[LABEL][rows], np.nan_to_num(scores)), len(rows)


def test_a_year(year, capsys):
    year.begin()
    runs = []
    for month in range(1, MONTHS + 1):
        started, kill = time.monotonic(), KILLS[month % len(KILLS)]
        auc = play_month(year, month, kill, runs)
        with capsys.disabled():
            events = [f"{event} {who}" for event, who in EVENTS.get(month, {}).items()]
            told = f"{', '.join([f'kill in {kill}', *events])}, AUC {auc:.4f}"
            told += f", {time.monotonic() - started:.0f} s"
            print(f"\nmonth {month}: {told}", flush=True)
    check_answers(year)
    for name in (LENDER, *year.shown):
        told = year.log(name)
        assert told["holds"] is (name not in year.restored), told["said"]
        if name in year.restored:  # others have met lines that are not in the copy
            assert any("this log was rewritten afterwards" in line for line in told["said"])
    year.client.kill()
    year.service.send_signal(signal.SIGINT)
    assert year.service.wait(60) == 0
    assert year.state(runs[-1], 0)["state"] == "ended"


def play_month(year, month, kill, runs):
    """New tables, a run on them, its figures checked, promoted; then some are erased; its AUC."""
    events = EVENTS.get(month, {})
    if month > 1:
        year.write_tables(month)
        # Whoever comes back now has rows that the label party has not aligned.
        year.losses.append(new_tables := Loss(LENDER, "new tables", time.time()))
    for event in (ROTATE, EXPIRE, ENTER, LEAVE):
        if event in events:
            getattr(year, event)(events[event])
    if month > 1:
        year.align(kill == "alignment")
        new_tables.back_at = time.time()
    other_network = not {ENTER, LEAVE}.isdisjoint(events)
    goes_on = month % 2 == 0 and not other_network
    run = year.train(*(["--from", runs[-1]] if goes_on else []), kill=kill == "training")
    if RESTORE in events:
        year.back_up(events[RESTORE])
    runs.append(run)
    scores = year.predictions(run)
    auc = check_figures(year, [run] if other_network else runs, scores)
    year.scores[run.name] = scores
    if month == 1:
        year.json("promote", run)
        year.serve()
    else:
        assert year.json("promote", run)["services"] == ["http://127.0.0.1:8080"]
        year.ask_for(month)
    for loss in year.losses:
        if loss.during == "leaving":
            loss.back_at = min(loss.back_at, time.time())  # no row is asked of it any more
    if RESTORE in events:
        year.restore(events[RESTORE], run)
    if kill == "serving":
        year.lose("bank", "serving")
    year.wait_for_answer(time.time())
    check_erasure(year, month, run)
    found = year.state("project", 0)
    assert found["parties"] == dict.fromkeys(year.parties, True)
    (promoted,) = [one for one in found["runs"] if one["promoted"]]
    assert promoted["run"] == str(run)
    return auc


def check_figures(year, runs, scores):
    """The AUC of a new run on rows that neither it nor the run before has learned from."""
    if len(runs) == 1:
        figures, tables = [year.json("evaluate", runs[0])], [scores]
    else:
        figures = year.json("evaluate", runs[-1], "--beside", runs[-2])["runs"]
        tables = [scores, year.predictions(runs[-2])]
    for at, found in enumerate(figures):
        ordered = [tables[at], *tables[:at], *tables[at + 1 :]]
        auc, rows = offline_auc(year.customers, *ordered)
        assert found.get("common_rows", rows) == rows
        # Of a few pairs the written probabilities, float32, are equal where the outputs are not.
        assert found["test_auc"] == pytest.approx(auc, abs=2e-4)
    return figures[0]["test_auc"]


def check_erasure(year, month, run):
    """The bank erases customers: all other rows are answered as before, those are no more."""
    before = year.scores[run.name]
    gone = sorted(before.index)[:: len(before) // ERASED][:ERASED]
    year.customers.erased |= set(gone)
    year.ask_for(month)
    time.sleep(1)  # the client reads whom to ask for before each request
    done = year.forget("bank", gone)
    assert done["found"] == len(gone)
    pd.testing.assert_frame_equal(year.predictions(run), before.drop(index=gone))
    assert sum(year.state(run, 0)["erased"].values()) == len(gone)


def check_answers(year):
    """Every request was answered as the run that it names predicts, or by a named 503."""
    answers = year.answers()
    answered = [one for one in answers if one["status"] == 200]
    assert len(answered) > 20 * MONTHS
    for one in answered:
        (row,), run = one["told"]["predictions"], one["told"]["version"]
        expected = year.scores[run].loc[one["id"]]
        shown = [np.float32(expected[f"probability_{name}"]) for name in (0, 1)]
        assert [np.float32(value) for value in row["probabilities"]] == shown
    refused = [one for one in answers if one["status"] != 200]
    assert {one["status"] for one in refused} <= {503}
    assert {one["told"]["party"] for one in refused} <= {LENDER, *year.others}
    unaligned = {one["told"]["error"] for one in refused if one["told"]["party"] == LENDER}
    assert all("vfl align" in said for said in unaligned)
    assert {one["told"]["version"] for one in answered} == {*year.scores}


def test_each_refusal_named_a_party_that_was_away(year):
    """After `test_a_year`: a 503 while the party that it names runs would be a fault."""
    answers = year.answers()
    answered = [one for one in answers if one["status"] == 200]
    unexcused = [
        one
        for one in answers
        if one["status"] != 200
        and not any(
            loss.party == one["told"]["party"]
            and loss.killed_at <= one["answered"]
            and one["asked"] <= first_answer(answered, loss)
            for loss in year.losses
        )
    ]
    assert unexcused == []


def first_answer(answered, loss):
    """When the client was first answered after a party was back."""
    return min((one["answered"] for one in answered if one["asked"] > loss.back_at), default=np.inf)
