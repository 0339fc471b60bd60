"""The page of whole, short, foreign and hostile run folders."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from made_records import attacked, utility

from vfl.config.run_folder import RunFolder
from vfl.core.errors import RunFolderError
from vfl.experiments.loaded_run import LoadedRun
from vfl.experiments.pages import build_report
from vfl.experiments.pages import run_page as run_page_module
from vfl.experiments.pages.run_page import run_page

VOID = {"meta", "link", "br", "hr", "img", "input", "path", "rect"}


class Reader(HTMLParser):
    """Checks that every element is closed in order, and collects text, ids and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def page_of(folder) -> tuple[str, Reader]:
    path = build_report(folder)
    assert path == folder / "report.html"
    html = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    return html, reader


def test_numbers_come_first(run_folder):
    _, page = page_of(run_folder())
    numbers = ["97.2 %", "1.03 MB", "25 times smaller than dense float32", "8.13 s"]
    locations = [page.text.index(number) for number in numbers]
    assert locations == sorted(locations)
    assert locations[-1] < page.text.index("Training")


def test_it_says_who_held_what_and_how_to_repeat_it(run_folder):
    _, page = page_of(run_folder())
    assert "left and right each held their own columns and a bottom model" in page.text
    assert "clinic held the labels and the top model. The parties trained in a Flower" in page.text
    assert "vfl train digits.toml --set codec=randtopk:k=4,alpha=0.1,values=8" in page.text
    assert "5f" * 32 in page.text
    assert 'party = "clinic"' in page.text
    assert "2.12.1" in page.text


SENT = {"bytes_up": {"left": 1}, "bytes_down": {"left": 1}}
OWN = '[label]\nparty = "right"\n[parties.left]\n[parties.right]\n'
DEALER = "beaver:dealer=notary"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "Size by formula 3.8 % of dense float32"),
        ({}, "Size on the wire 4.0 % of dense float32"),
        ({}, "Defense layer_norm"),
        ({}, "Privacy not measured in this run"),
        ({"summary": SENT}, "against dense float32: not measured"),
        ({"summary": SENT | {"wire_ratio": 0.5}}, "2 times smaller than dense float32"),
        ({"summary": SENT | {"wire_ratio": 1.01}}, "as large as dense float32"),
        ({"summary": SENT | {"wire_ratio": 1.5}}, "1.5 times the size of dense float32"),
        ({"config": OWN}, "left held its own columns and a bottom model"),
        ({"config": OWN}, "the labels, columns of its own and the top model"),
        (
            {"summary": SENT | {"secure": DEALER, "bytes_up": {"left": 1, "notary": 1}}},
            "left and right each held their own columns and shares of first layers, which no party",
        ),
    ],
)
def test_what_a_page_says(run_folder, parts, words):
    assert words in page_of(run_folder(**parts))[1].text


def test_the_ledger_is_added_up_by_party_and_by_phase(run_folder):
    traffic = [
        "a,down,train,10,90,250,0",
        "b,up,train,1,4,20,0.034",
        "a,up,evaluate,2,100,132,0.5",
        "a,up,train,10,900,1060,1.5",
    ]
    _, page = page_of(run_folder(traffic=traffic))
    parties = [
        "a up 12 1 kB 1.19 kB 99 B 2 s",
        "a down 10 90 B 250 B 25 B",
        "b up 1 4 B 20 B 20 B 34 ms",
    ]
    phases = [
        "train up 11 904 B 1.08 kB 98 B 1.53 s",
        "train down 10 90 B 250 B 25 B",
        "evaluate up 2 100 B 132 B 66 B 500 ms",
    ]
    locations = [page.text.index(line) for line in parties + phases]
    assert locations == sorted(locations)


REVEALED = {"observer": "clinic", "what": "sum of the cuts", "of": "all", "phase": "train",
            "times": 400, "values": 1_638_400}  # fmt: skip


def test_the_secure_mode_and_what_was_revealed_are_told(run_folder, make_head):
    summary = {"secure": "sum", "trust": "clinic learns the sum alone", "revealed": [REVEALED]}
    _, page = page_of(run_folder(summary=summary))
    assert "Secure sum: clinic learns the sum alone Privacy" in page.text
    assert "clinic sum of the cuts all train 400 1,638,400" in page.text
    _, page = page_of(run_folder(summary=summary, head=make_head(mode="in-process")))
    assert "alone; here all parties ran in one process, which protects no one" in page.text
    _, page = page_of(run_folder(summary={"secure": "none", "trust": "clinic sees every cut"}))
    assert "Secure none: clinic sees every cut Privacy" in page.text
    assert "What was revealed" not in page.text


@pytest.mark.parametrize("revealed", ["x", [1], [{}], [{"observer": ["a"]}], None])
def test_a_damaged_ledger_of_leakage_makes_no_page_fail(run_folder, revealed):
    page_of(run_folder(summary={"secure": "sum", "revealed": revealed}))


def test_nothing_but_one_script_runs_and_nothing_is_fetched(run_folder):
    html, page = page_of(run_folder())
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html  # so no other runs
    assert "http://" not in html
    assert "https://" not in html
    assert "url(" not in html
    assert "@import" not in html
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "srcset", "action"}
    assert not [name for name in names if name.startswith("on")]
    assert "default-src 'none'" in html


def test_sixty_four_parties_fit_on_one_page(run_folder, make_epochs, make_traffic):
    parties = [f"hospital-number-{n}" for n in range(64)]
    html, page = page_of(
        run_folder(metrics=make_epochs(1500), traffic=make_traffic(parties), config="")
    )
    assert len(html.encode()) < 60_000
    assert "the 5 largest of 64" in page.text
    assert all(f" {party} " in page.text for party in parties)


def test_a_run_that_measured_nothing_says_so(run_folder):
    folder = run_folder(metrics=[], traffic=[], summary=None, environment={}, config="")
    for name in ("metrics.jsonl", "traffic.csv", "environment.json", "config.toml"):
        (folder / name).unlink()
    _, page = page_of(folder)
    assert "svg" not in page.tags
    assert "Test accuracy not measured" in page.text
    assert "On the wire not measured" in page.text
    assert "Steps per second not measured" in page.text
    assert "Codec not recorded" in page.text
    assert "the label party held the labels" in page.text


def test_without_a_summary_the_ledger_and_the_epochs_speak(run_folder):
    _, page = page_of(run_folder(summary=None))
    assert "97.2 %" in page.text
    assert "Codec randtopk:k=4" in page.text  # of the resolved experiment
    assert "On the wire 1.08 MB" in page.text  # 2 parties, 2 directions, 440 frames of 616 bytes
    _, page = page_of(run_folder(summary=None, traffic=[]))
    assert "On the wire 1.03 MB" in page.text  # 20 epochs of 51,500 bytes


def test_a_line_cut_short_by_a_crash_is_left_out(run_folder):
    folder = run_folder(metrics=[{"epoch": 1, "train_loss": 2.0}, {"epoch": 2, "train_loss": 1.0}])
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"epoch": 3, "trai')
    assert "Epochs 2" in page_of(folder)[1].text


def test_the_same_folder_gives_the_same_bytes_and_no_other_file(run_folder):
    folder = run_folder()
    first = page_of(folder)[0]
    assert page_of(folder)[0] == first
    assert [path.name for path in folder.glob("*report*")] == ["report.html"]
    assert list(folder.glob(".*")) == []


@pytest.mark.parametrize("version", [7, None])
def test_another_format_is_refused(run_folder, make_head, version):
    with pytest.raises(RunFolderError, match="another format"):
        build_report(run_folder(head=make_head(format=version)))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", b"{", "not as it was written"),
        ("environment.json", b"[]", "no JSON object"),
        ("environment.json", b"[" * 100_000, "not JSON"),
        ("summary.json", b"\xff\xfe", "not as it was written"),
        ("environment.json", b"\xff\xfe", "not JSON"),
        ("traffic.csv", b"\xff\xfe", "not text"),
        ("metrics.jsonl", b'{"epoch": 1}\nsecret-cell\n', r"metrics\.jsonl:2"),
        ("config.toml", b"secret-cell", "not as it was written"),
        ("traffic.csv", b"party,direction\n", "lacks a column"),
        (
            "traffic.csv",
            b"party,direction,phase,frames,payload_bytes,wire_bytes,seconds\na,up,train,secret-cell,1,1,1\n",
            r"traffic\.csv:2",
        ),
    ],
)
def test_a_damaged_file_is_named_and_not_quoted(run_folder, name, content, words):
    folder = run_folder()
    (folder / name).write_bytes(content)
    with pytest.raises(RunFolderError, match=words) as caught:
        build_report(folder)
    assert name in str(caught.value)
    assert "secret-cell" not in json.dumps(caught.value.record())
    assert not (folder / "report.html").exists()


def test_the_report_needs_no_torch():
    code = "import sys, vfl.experiments.pages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e\u200b'\"><img src=x onerror=y>"


def test_hostile_text_is_shown_and_does_nothing(run_folder, make_head):
    """Wherever it stands: names, command, configuration, figures of the summary, the ledger."""
    head = make_head(name=HOSTILE, command=HOSTILE)
    config = f"name = {json.dumps(HOSTILE)}\n[parties.{json.dumps(HOSTILE)}]\nwidth = 4\n"
    summary = {
        "secure": HOSTILE,
        "trust": HOSTILE,
        "codec": HOSTILE,
        "defense": HOSTILE,
        "bytes_up": {HOSTILE: 1},
        "revealed": [REVEALED | {"observer": HOSTILE, "what": HOSTILE}],
    }
    content, page = page_of(run_folder(head=head, config=config, summary=summary))
    assert content.count("<script") == 1  # ours
    assert "<img" not in content
    assert not set("\x1b\u202e\u200b") & set(content)
    assert "<script>alert(1)</script>?[2J??" in page.text


def test_an_attack_has_one_number_the_mean_of_its_draws(run_folder, monkeypatch):
    """The best of three draws is no figure of an attack: it would beat its own table."""
    values = (0.60, 0.655, 0.758)
    rows = [
        attacked("none", "fine_tuning", 1, 0, value, draw=draw, baselines={"scratch": 0.5})
        for draw, value in enumerate(values)
    ] + [attacked("none", "kmeans", 0, 0, 0.65)]
    stale = attacked("none", "spectral", 1, 0, 0.99, stale="its code has changed since")
    monkeypatch.setattr(run_page_module, "attacks_on_run", lambda run: [*rows, stale])
    monkeypatch.setattr(run_page_module, "trained_records", lambda run: [utility("none", 0, 1)])
    page = run_page(LoadedRun(run_folder()))
    sections = {one.title: one for one in page.sections}
    (table,) = sections["Attacks"].tables
    assert table.rows[0][table.head.index("reaches")] == "67.1 %"
    assert "spectral" not in str(table.rows) + str(page.glance)
    stale = sections["Stale results, whose rows or code have changed since"]
    ((_, what, _, was, why),) = stale.tables[0].rows
    assert (what, was, why) == (
        "spectral, k = 1, draw 0", "99.0\xa0%", "its code has changed since",
    )  # fmt: skip
    methods = dict(sections["Compression and defense"].pairs)
    privacy = methods["Privacy"]
    assert privacy.startswith(
        "fine_tuning infers labels with accuracy 67.1 % (mean of 3 draws) from 1 leaked labels"
    )
    assert "50.0 % without the model" in privacy
    card = next(one for one in page.glance.cards if one.title.startswith("Label inference"))
    assert "fine_tuning, mean of 3 draws" in card.note
    assert any("accuracy 67.1 %" in one for one in page.glance.details)
    assert "more victims" not in " ".join(page.glance.details)
    assert "75.8" not in str(methods) + page.glance.sentence


def test_evaluations_say_whose_rows_they_are_of(run_folder, monkeypatch):
    """Own test rows, rows that are new, and rows that several runs share are told apart."""
    figures = {"test_accuracy": 0.9, "evaluated": "2026-11-28T16:21:42+00:00"}
    rows = {"test": 40, "new": 7, "left_out": 1234}
    evaluations = [
        figures,
        figures | {"rows": rows, "new_accuracy": 0.5},
        {"rows": rows | {"test": 0}, "new_accuracy": 0.25},
        figures | {"common_rows": 21, "beside": ["one", "two"]},
    ]
    monkeypatch.setattr(RunFolder, "evaluations", lambda folder: evaluations)
    monkeypatch.setattr(LoadedRun, "rows", {"train": 3980, "validation": 57, "test": 114})
    text = page_of(run_folder())[1].text
    for line in (
        "1, 28 November 2026, 16:21 UTC its test rows 114 90.0 %",
        "2, 28 November 2026, 16:21 UTC its test rows; 1,234 that it learned from are left out 40 "
        "90.0 %",
        "2, 28 November 2026, 16:21 UTC new rows 7 50.0 %",
        "3 new rows 7 25.0 %",
        "4, 28 November 2026, 16:21 UTC rows that none of one and two learned from 21 90.0 %",
        "on 3,980 training, 57 validation, 114 test rows",
    ):
        assert line in text.replace("\xa0", " ")
    assert text.count("its test rows") == 2
