"""A pretrained decoder fine-tuned in three parts is the decoder fine-tuned whole."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vfl.config import Experiment
from vfl.core.seeds import scoped
from vfl.datasets import PartyData
from vfl.datasets.split import split_rows
from vfl.models import make_bottom
from vfl.session import rules
from vfl.training.local import LocalSession

SIZES = "words=40,tokens=8,layers=3,heads=2,front=1"
WORDS = 6


def experiment_of(codec="none", middle_codec="none"):
    return Experiment.model_validate(
        {
            "seed": 3,
            "codec": codec,
            "parties": {"user": {"width": 8 * WORDS}},
            "middle": {"party": "server", "width": 8, "codec": middle_codec},
            "label": {"party": "head", "top": "linear"},
            "train": {"epochs": 3, "batch_size": 16, "learning_rate": 0.01},
        }
    )


@pytest.fixture(scope="module")
def texts():
    """Texts that are for or against, by whether they hold more words above 20 than below."""
    draw = torch.Generator().manual_seed(4)
    rows = torch.randint(2, 40, (200, WORDS), generator=draw).float()
    labels = ((rows > 20).sum(1) > WORDS // 2).long()
    split = split_rows(200, 3, test=0.2, validation=0.1)
    user = PartyData("user", rows, None, None, split, bytes(32))
    head = PartyData("head", None, labels, ("no", "yes"), split, bytes(32))
    return {"user": user, "head": head}


def parts(rank):
    with scoped(5):
        front = make_bottom(f"decoder_front:{SIZES},rank={rank}").build((WORDS,), 8 * WORDS)
        middle = make_bottom(f"decoder_middle:{SIZES},rank={rank}").build((8 * WORDS,), 8)
        return front, middle, nn.Linear(8, 2)


def played(texts, modules, **codecs):
    front, middle, head = modules
    bottoms = {"user": front, "server": middle}
    return LocalSession(experiment_of(**codecs), texts, outputs=2, bottoms=bottoms, top=head).run()


@pytest.mark.parametrize("rank", [0, 2])
def test_it_is_the_monolith_bit_for_bit(texts, rank):
    ours = parts(rank)
    monolith = nn.Sequential(*copy.deepcopy(ours))
    session = played(texts, ours)

    inputs, labels = texts["user"].inputs, texts["head"].labels
    optimizer = torch.optim.Adam(
        [one for one in monolith.parameters() if one.requires_grad], lr=0.01
    )
    for exchange in rules.schedule(session.terms, texts["user"].split):
        if exchange.trains:
            rows = torch.from_numpy(exchange.rows)
            optimizer.zero_grad()
            F.cross_entropy(monolith(inputs[rows]), labels[rows]).backward()
            optimizer.step()
    for split, whole in zip(nn.Sequential(*ours).parameters(), monolith.parameters(), strict=True):
        assert torch.equal(split, whole)


def test_codecs_on_both_cuts_cost_fewer_bytes_and_only_adapters_and_head_learn(texts):
    before = copy.deepcopy(parts(2))
    dense = played(texts, parts(2)).ledger.bytes_by_party("up")
    ours = parts(2)
    session = played(texts, ours, codec="quantise:values=4", middle_codec="topk:k=2")
    sent = session.ledger.bytes_by_party("up")
    assert sent["user"] < dense["user"] / 4
    assert sent["server"] < dense["server"] / 2
    for old, new in zip(before[:2], ours[:2], strict=True):
        for name, value in new.named_parameters():
            assert torch.equal(value, old.get_parameter(name)) is not value.requires_grad
