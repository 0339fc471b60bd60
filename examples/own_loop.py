"""A split network in your own training loop: a SplitModule is an ordinary torch module."""

import torch
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from torch import nn

from vfl import SplitModule

pictures, labels = shuffle(*load_digits(return_X_y=True), random_state=0)
rows = torch.tensor(pictures / 16, dtype=torch.float32).view(-1, 8, 8)
targets = torch.tensor(labels)
halves = {"left": rows[:, :, :4], "right": rows[:, :, 4:]}

torch.manual_seed(0)
bottoms = {
    name: nn.Sequential(nn.Flatten(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    for name in halves
}
top = nn.Sequential(nn.ReLU(), nn.Linear(32, 10))
model = SplitModule(bottoms, top, {"left": 16, "right": 16}, codec="topk:k=4,values=8")
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for _ in range(20):
    for batch in torch.randperm(1500).split(64):
        parts = {name: half[batch] for name, half in halves.items()}
        loss = nn.functional.cross_entropy(model(parts), targets[batch]) + model.extra_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    answers = model({name: half[1500:] for name, half in halves.items()}).argmax(dim=1)
accuracy = float((answers == targets[1500:]).float().mean())
print(f"accuracy {accuracy:.3f}, {model.ledger.total_bytes('up')} bytes up")
