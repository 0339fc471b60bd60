"""What tests of shared first layers have in common, whoever deals."""

import torch

from vfl import models
from vfl.config import Experiment
from vfl.core.seeds import generator, scoped
from vfl.mpc import ring
from vfl.mpc.secure.beaver import owner_of, partner_of
from vfl.mpc.secure.shared_layer import WEIGHT_BITS
from vfl.training.local import LocalSession

LABEL, DEALER = "lender", "notary"
SECURE = f"beaver:dealer={DEALER}"
TRAIN = {
    "epochs": 2,
    "batch_size": 32,
    "optimizer": "sgd",
    "momentum": 0,
    "learning_rate": 0.3,
    "checkpoint_every": 5,
}


def experiment(secure=SECURE, parties=("bank",), width=12, train=None, **changes):
    content = {
        "merge": "sum",
        "secure": secure,
        "parties": {name: {"width": width, "bottom": "mlp:hidden=none"} for name in parties},
        "label": {"party": LABEL, "top": "mlp:hidden=32"},
        "train": TRAIN | (train or {}),
    }
    return Experiment.model_validate(content | changes)


def session(data, secure=SECURE, **more):
    """A session between all parties of `data` that have columns."""
    kept = {key: more.pop(key) for key in ("observers", "mode", "weights", "bottoms", "checkpoints",
                                           "adversaries") if key in more}  # fmt: skip
    names = [name for name in data if data[name].inputs is not None]
    return LocalSession(experiment(secure, names, **more), data, outputs=10, **kept)


def fresh(data, width=12, first=0):
    """A bottom for every party with columns, drawn from the seeds that begin with `first`."""
    made = {}
    for number, name in enumerate(name for name in data if data[name].inputs is not None):
        with scoped(first + number):
            shape = tuple(data[name].inputs.shape[1:])
            made[name] = models.make_bottom("mlp:hidden=none").build(shape, width)
    return made


def encode_weights(layer):
    """A plain layer's weights in the ring, the bias as last row; int64, (columns + 1, width)."""
    whole = torch.cat([layer.weight.detach().t(), layer.bias.detach()[None]])
    return ring.encode(whole, WEIGHT_BITS, "weights", integer_bits=10)


def start_from(session, bottoms):
    """Give everybody uniform shares of these bottoms."""
    draw, order = generator(0, "shares"), tuple(one.name for one in session.clients)
    whole = {name: encode_weights(bottoms[name][-1]) for name in order}
    own = {
        name: torch.randint(-(2**63), 2**63 - 1, words.shape, generator=draw)
        for name, words in whole.items()
    }
    for client in session.clients:
        mine = {"own": own[client.name]}
        if session.terms.secure == SECURE:
            other = {"share": whole[client.name] - own[client.name]}
            session.label.ends[client.name].codec.load_state_dict(other)
        else:
            owner = owner_of(client.name, order)
            mine["other"] = whole[owner] - own[owner]
        client.end.load_state_dict(mine)
    return session


def other_share(weights, name):
    """The share of a party's layer that another one has, and where that is."""
    if f"codec-{name}/share" in weights[LABEL]:
        return LABEL, f"codec-{name}/share"
    return partner_of(name, tuple(one for one in weights if "own" in weights[one])), "other"


def joined_words(weights, name):
    """A party's layer, from both shares: what nobody has; int64, (columns + 1, width)."""
    holder, key = other_share(weights, name)
    return weights[name]["own"] + weights[holder][key]


def joined(weights, name):
    """The same as numbers; float64."""
    return joined_words(weights, name).double() * 2.0**-WEIGHT_BITS


def exact(client):
    """A plain party's layer as the shared one would stand; float64, (columns + 1, width)."""
    return encode_weights(client.end.model["bottom"][-1]).double() * 2.0**-WEIGHT_BITS
