"""What a party that holds a share of its first layer sees of a training, and what it may try."""

from dataclasses import replace

import numpy as np
import torch

from vfl.attacks.cases import draw_leak
from vfl.attacks.labels.classifiers import fit_logistic
from vfl.attacks.scoring import accuracy
from vfl.core.seeds import generator


class Diary:
    """Everything the holder sees of a training, as it happens; it follows the protocol."""

    def __init__(self, session, holder):
        (self.end,) = (client.end for client in session.clients if client.name == holder)
        self.shares, self.opened, self.products, self.changes, self.gradients = [], [], [], [], {}
        begin = self.end.begin

        def noting(*given):
            begin(*given)
            attempt = self.end._attempt
            self.end._attempt = replace(attempt, owner=self.owner(attempt.owner))

        self.end.begin = noting

    def owner(self, owner):
        outputs, change = owner.outputs, owner.change

        def noting_outputs(inputs, share, weights, step):
            self.shares.append(share.clone())
            self.opened.append(share + weights)
            return outputs(inputs, share, weights, step)

        def noting_change(inputs, gradient, step):
            self.gradients[step] = gradient.clone()
            self.products.append(inputs.t() @ gradient)
            self.changes.append(change(inputs, gradient, step))
            return self.changes[-1]

        owner.outputs, owner.change = noting_outputs, noting_change
        return owner

    def bottoms(self):
        """Whatever might stand for the bottom: int64 or float, axes (columns + 1, width)."""
        first, last = self.shares[0], self.shares[-1]
        floats = [share.double() for share in self.opened]
        return {
            "first share": first,
            "last share": last,
            "what changed": first - last,
            "last opened": self.opened[-1],
            "mean share": torch.stack([share.double() for share in self.shares]).mean(0),
            "mean opened": torch.stack(floats).mean(0),
            "sum of products": sum(self.products[1:], start=self.products[0]),
            "sum of late products": sum(product.double() for product in self.products[-40:]),
            "start less products": first - sum(self.products[1:], start=self.products[0]),
        }

    def never_repeats(self):
        """All that others sent it looks uniform, and nothing comes twice."""
        kinds = {
            "shares": self.shares[1:],
            "openings": self.opened,
            "changes": self.changes,
            "gradients": list(self.gradients.values()),
        }
        for name, words in kinds.items():
            assert uniform(torch.cat([one.flatten() for one in words]).numpy()), name
            if name != "shares":  # which stay as they are while rows are evaluated
                assert len({one.numpy().tobytes() for one in words}) == len(words), name


def weights_of(bottom):
    """Axes (columns + 1, width) as the weights of a party, scaled as a layer begins.

    Classifiers care for no scale, and an attacker would choose one that trains well.
    """
    scaled = bottom.double()
    scaled = scaled / scaled.std() * len(scaled) ** -0.5
    return {
        "bottom.1.weight": scaled[:-1].t().float().contiguous(),
        "bottom.1.bias": scaled[-1].float(),
    }


def labels_from(values, labels, leaks, seeds):
    """Accuracy of a logistic regression on rows of which two of each class leaked."""
    found = []
    for seed in seeds:
        leaked = draw_leak(labels, leaks, generator(seed, "leak"))
        read = fit_logistic(values[leaked], labels[leaked], 10, strength=100.0)
        found.append(accuracy(read(values), labels))
    return sum(found) / len(found)


def uniform(words):
    """Whether the bytes of numpy words look uniform: chi-square within five deviations."""
    counts = np.bincount(np.ascontiguousarray(words).view(np.uint8).ravel(), minlength=256)
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    return statistic < 255 + 5 * np.sqrt(2 * 255)
