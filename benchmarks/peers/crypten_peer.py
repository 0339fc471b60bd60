"""CrypTen (Knott et al. 2021) under `talk.py`: two parties and its default dealer, at party 0."""

from __future__ import annotations

import math
import os
import sys
import types
from importlib import import_module
from typing import Any


class Peer:
    """One party of CrypTen."""

    def __init__(self, assignment: dict[str, Any], port: int) -> None:
        self._assignment = assignment
        os.environ["GLOO_SOCKET_IFNAME"] = assignment["device"]
        self._torch = import_module("torch")
        self._torch.set_num_threads(1)
        # Later versions of torch lack this module; CrypTen imports it for ONNX only, which the
        # benchmark does not use.
        absent = types.ModuleType("torch.onnx.symbolic_registry")
        sys.modules.setdefault(absent.__name__, absent)
        import_module("torch.onnx").symbolic_registry = absent  # type: ignore[attr-defined]
        self._crypten = import_module("crypten")

    def connect(self, endpoints: list[tuple[str, int]]) -> None:
        """Connect the parties by gloo; the first party runs gloo's store."""
        host, port = endpoints[0]
        os.environ |= {
            "DISTRIBUTED_BACKEND": "gloo",
            "RENDEZVOUS": f"tcp://{host}:{port}",
            "WORLD_SIZE": str(self._assignment["parties"]),
            "RANK": str(self._assignment["rank"]),
        }
        self._crypten.init()

    def prepare(self, task: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Share the values, which rank 0 has."""
        self._task = task
        self._own = {
            name: self._crypten.cryptensor(self._torch.from_numpy(value).float(), src=0)
            for name, value in arrays.items()
        }

    def run(self) -> None:
        with self._crypten.no_grad():
            self._found = self._compute()

    def result(self) -> dict[str, Any] | None:
        plain = {name: value.get_plain_text().numpy() for name, value in self._found.items()}
        return plain if self._assignment["rank"] == 0 else None

    def _compute(self) -> dict[str, Any]:
        task, own = self._task, self._own
        if task["decoder"]:
            return self._decoder(task["decoder"])
        if task["function"] == "cnn":
            images = own["inputs"].conv2d(own["conv"]).relu().max_pool2d(2)
            inner = images.flatten(start_dim=1).matmul(own["first"]).relu()
            return {"": inner.matmul(own["second"])}
        if task["function"]:
            return {"": _element_wise(task["function"], own["inputs"])}
        values, seen, last = own["inputs"], [], len(task["widths"]) - 2
        slopes: list[Any] = []
        for index in range(last + 1):
            seen.append(values)
            values = values.matmul(own[f"{index}.weight"]) + own[f"{index}.bias"]
            if index < last:
                slopes.append(values > 0)
                values = values * slopes[-1]
        outputs = values.sigmoid()
        if not task["training"]:
            return {"": outputs}
        delta = outputs - own["targets"]
        stepped = {}
        for index in range(last, -1, -1):
            weight, bias = f"{index}.weight", f"{index}.bias"
            stepped[weight] = own[weight] - seen[index].t().matmul(delta) * task["rate"]
            stepped[bias] = own[bias] - delta.sum(0) * task["rate"]
            if index:
                delta = delta.matmul(own[weight].t()) * slopes[index - 1]
        return stepped

    def _decoder(self, step: dict[str, Any]) -> dict[str, Any]:
        """Return the logits of the next token, and the index of the largest logit."""
        torch, cat, own, heads = self._torch, self._crypten.cat, self._own, step["heads"]
        cos, sin = torch.tensor(step["cos"]), torch.tensor(step["sin"])
        steps, x = len(cos), own["inputs"].matmul(own["tokens"])
        future = torch.ones(steps, step["past"] + steps).triu(step["past"] + 1)

        def normed(x: Any) -> Any:
            width = x.size(-1)
            mean = (x * x).sum(-1, keepdim=True) / width
            return x * (mean + step["epsilon"]).inv_sqrt()

        def turned(x: Any) -> Any:
            half = x.size(-1) // 2
            return x * cos + cat([-x[..., half:], x[..., :half]], -1) * sin

        for index in range(step["layers"]):
            name, width = f"layers.{index}", x.size(-1)
            parts = normed(x).matmul(own[f"{name}.attention_in"])
            q, k, v = (
                parts[:, start : start + width].reshape(steps, heads, -1).transpose(0, 1)
                for start in range(0, 3 * width, width)
            )
            q, k = turned(q), turned(k)
            if step["past"]:
                k, v = (
                    cat([own[f"{index}.{kind}"], each], 1)
                    for kind, each in (("keys", k), ("values", v))
                )
            scores = q.matmul(k.transpose(1, 2))
            if steps > 1:
                # CrypTen's exponential is computed as a limit that diverges below -256.
                scores = scores * (1 - future) - 60 * future
            found = scores.softmax(-1).matmul(v).transpose(0, 1).reshape(steps, width)
            x = x + found.matmul(own[f"{name}.attention_out"])
            inner = normed(x).matmul(own[f"{name}.mlp_in"])
            half = inner.size(-1) // 2
            gate = inner[:, :half]
            x = x + (gate * gate.sigmoid() * inner[:, half:]).matmul(own[f"{name}.mlp_out"])
        logits = normed(x[-1:]).matmul(own["head"])
        return {"logits": logits, "token": logits.argmax(-1, one_hot=False)}


def _element_wise(name: str, values: Any) -> Any:
    if name == "relu":
        return values.relu()
    if name == "gelu":
        # CrypTen's series of erf diverges beyond 3, so this uses the form with tanh (Hendrycks and
        # Gimpel 2016).
        inner = values + values * values * values * 0.044715
        return values * (inner * (8 / math.pi) ** 0.5).sigmoid()
    return values.inv_sqrt()
