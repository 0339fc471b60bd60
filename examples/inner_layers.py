"""Potential energy on an inner layer, if one owner trains both bottom and top, as in the thesis.

In a federation no party can add this loss term, because the label party has no inner layer, and the
feature party has no labels. An owner who trains both models before giving the bottom model away can
add the term in a training loop of their own.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.utils import shuffle
from torch import nn

from vfl import SplitModule
from vfl.defenses.potential import potential_energy

pictures, labels = shuffle(*load_digits(return_X_y=True), random_state=0)
rows, targets = torch.tensor(pictures / 16, dtype=torch.float32), torch.tensor(labels)
train, test = slice(0, 1400), slice(1400, None)


def few(rows_a_class=5):
    """Return the first training rows of each class; an attacker knows their labels."""
    return torch.cat([(targets[train] == code).nonzero()[:rows_a_class, 0] for code in range(10)])


inner = []
for weight in (0.0, 1.0):
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU())
    bottom = nn.Sequential(hidden, nn.Linear(64, 32))
    defense = f"potential:alpha={weight},norm=no"
    top = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    model = SplitModule({"user": bottom}, top, {"user": 32}, defense=defense)
    hook = hidden.register_forward_hook(lambda layer, given, result: inner.append(result))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(20):
        for batch in torch.randperm(1400).split(128):
            logits = model({"user": rows[batch]}, targets[batch])
            loss = nn.functional.cross_entropy(logits, targets[batch]) + model.extra_loss()
            loss = loss + weight * potential_energy(inner.pop(), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    hook.remove()
    model.eval()
    with torch.no_grad():
        accuracy = float((model({"user": rows[test]}).argmax(1) == targets[test]).float().mean())
        layer = hidden(rows).numpy()
    reader = LogisticRegression(max_iter=500).fit(layer[few()], labels[few()])
    read = reader.score(layer[test], labels[test])
    print(f"weight {weight:.0f}: accuracy {accuracy:.3f}, attack with 5 labels {read:.0%}")
