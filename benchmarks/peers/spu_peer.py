"""SPU (Ma et al. 2023) under `talk.py`: FM64, protocols semi2k and aby3; see spu's own reference.

Compiling and sharing take place before the measured time, which covers only `Runtime.run`.
"""

from __future__ import annotations

import base64
import json
from importlib import import_module
from typing import Any

import numpy as np

_WAIT_MS = 120_000
_PROTOCOLS = {"spu-semi2k": "SEMI2K", "spu-aby3": "ABY3"}


class Peer:
    """One party of SPU."""

    def __init__(self, assignment: dict[str, Any], port: int) -> None:
        self._assignment = assignment
        self._spu = import_module("spu")
        self._lib = import_module("spu.libspu")
        self._frontend = import_module("spu.utils.frontend")
        self._jax = import_module("jax")
        self._held: list[str] = []

    def connect(self, endpoints: list[tuple[str, int]]) -> None:
        """Register every party by name; SPU retries until all parties are reachable."""
        desc = self._lib.link.Desc()
        desc.recv_timeout_ms = _WAIT_MS
        for rank, (host, port) in enumerate(endpoints):
            desc.add_party(f"P{rank}", f"{host}:{port}")
        self._link = self._lib.link.create_brpc(desc, self._assignment["rank"])
        protocol = getattr(self._lib.ProtocolKind, _PROTOCOLS[self._assignment["system"]])
        config = self._lib.RuntimeConfig(protocol=protocol, field=self._lib.FieldType.FM64)
        # One thread for each party, as for all systems.
        config.experimental_enable_inter_op_par = False
        config.experimental_enable_intra_op_par = False
        config.max_concurrency = 1
        self._io = self._spu.Io(self._assignment["parties"], config)
        self._runtime = self._spu.Runtime(self._link, config)

    def prepare(self, task: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Compile the workload, and receive this party's shares of the values of rank 0."""
        names = list(arrays)
        values = [arrays[name].astype(np.float32) for name in names]
        secret = self._lib.Visibility.VIS_SECRET
        for name in self._held:
            self._runtime.del_var(name)
        self._code, _ = self._frontend.compile(
            self._frontend.Kind.JAX,
            _program(self._jax, task, names),
            values,
            {},
            names,
            [secret] * len(names),
            lambda outputs: [f"out{index}" for index in range(len(outputs))],
        )
        self._held = names
        # jax returns the values of a dictionary in the order of its sorted keys.
        self._outputs = sorted(_outputs(task))
        for name, value in zip(names, values, strict=True):
            made = self._io.make_shares(value, secret) if self._assignment["rank"] == 0 else []
            packed = [_packed(each) for each in made] or [""] * self._assignment["parties"]
            self._runtime.set_var(name, self._unpacked(self._link.scatter(packed, 0)))

    def run(self) -> None:
        self._runtime.run(self._code)

    def result(self) -> dict[str, Any] | None:
        found = {}
        for index, name in enumerate(self._outputs):
            own = _packed(self._runtime.get_var(f"out{index}"))
            shares = self._link.gather(own, 0)
            if self._assignment["rank"] == 0:
                found[name] = self._io.reconstruct([self._unpacked(each) for each in shares])
        return found or None

    def _unpacked(self, text: str) -> Any:
        meta, *chunks = (base64.b64decode(each) for each in json.loads(text))
        share = self._lib.Share()
        share.meta, share.share_chunks = meta, chunks
        return share


def _packed(share: Any) -> str:
    parts = [share.meta, *share.share_chunks]
    return json.dumps([base64.b64encode(part).decode() for part in parts])


def _outputs(task: dict[str, Any]) -> list[str]:
    if task["decoder"]:
        return ["logits", "token"]
    if not task["training"]:
        return [""]
    layers = range(len(task["widths"]) - 1)
    return [f"{index}.{kind}" for index in layers for kind in ("weight", "bias")]


def _program(jax: Any, task: dict[str, Any], names: list[str]) -> Any:
    """Return the workload as a jax function of arrays in the order of `names`."""
    jnp, last = jax.numpy, len(task["widths"]) - 2
    functions = {
        "relu": lambda values: jnp.maximum(values, 0),
        "gelu": jax.nn.gelu,
        "rsqrt": jax.lax.rsqrt,
    }

    def logits(own: dict[str, Any], values: Any) -> tuple[Any, list[Any]]:
        seen = []
        for index in range(last + 1):
            seen.append(values)
            values = values @ own[f"{index}.weight"] + own[f"{index}.bias"]
            if index < last:
                values = jnp.maximum(values, 0)
        return values, seen

    def workload(*arrays: Any) -> Any:
        own = dict(zip(names, arrays, strict=True))
        if task["decoder"]:
            return _decoder(jax, task["decoder"], own)
        if task["function"]:
            return {"": functions[task["function"]](own["inputs"])}
        values, seen = logits(own, own["inputs"])
        outputs = jax.nn.sigmoid(values)
        if not task["training"]:
            return {"": outputs}
        delta = outputs - own["targets"]
        stepped = {}
        for index in range(last, -1, -1):
            weight, bias = f"{index}.weight", f"{index}.bias"
            stepped[weight] = own[weight] - (seen[index].T @ delta) * task["rate"]
            stepped[bias] = own[bias] - delta.sum(0) * task["rate"]
            if index:
                delta = (delta @ own[weight].T) * (seen[index] > 0)
        return stepped

    return workload


def _decoder(jax: Any, step: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the logits of the next token, and the index of the largest logit."""
    jnp, heads = jax.numpy, step["heads"]
    cos, sin = np.array(step["cos"], np.float32), np.array(step["sin"], np.float32)
    steps = len(cos)
    mask = np.tril(np.ones((steps, step["past"] + steps), bool), step["past"])

    def normed(x: Any) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + step["epsilon"])

    def turned(x: Any) -> Any:
        first, second = jnp.split(x, 2, -1)
        return x * cos + jnp.concatenate([-second, first], -1) * sin

    x = own["inputs"] @ own["tokens"]
    for index in range(step["layers"]):
        name, width = f"layers.{index}", x.shape[-1]
        parts = jnp.split(normed(x) @ own[f"{name}.attention_in"], 3, -1)
        q, k, v = (each.reshape(steps, heads, -1).swapaxes(0, 1) for each in parts)
        q, k = turned(q), turned(k)
        if step["past"]:
            k, v = (
                jnp.concatenate([own[f"{index}.{kind}"], each], 1)
                for kind, each in (("keys", k), ("values", v))
            )
        scores = q @ k.swapaxes(1, 2)
        if steps > 1:
            scores = jnp.where(mask, scores, -100.0)
        found = (jax.nn.softmax(scores, -1) @ v).swapaxes(0, 1).reshape(steps, width)
        x = x + found @ own[f"{name}.attention_out"]
        gate, up = jnp.split(normed(x) @ own[f"{name}.mlp_in"], 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ own[f"{name}.mlp_out"]
    logits = normed(x[-1:]) @ own["head"]
    return {"logits": logits, "token": jnp.argmax(logits, -1)}
