"""Sealed files as somebody would change them who knows how they are sealed."""

import json

from vfl.core.storage import Seal, load_weights, pack_weights, sealed_text, unpack_weights

_SEAL = ("kind", "party", "run", "step")


def record_of(path):
    """A sealed JSON record, without a look at its seal."""
    return json.loads(path.read_text())


def reseal_json(path, change):
    """Change a record (by `change(record)`) and seal it as before."""
    record = record_of(path)
    change(record)
    seal = Seal(**{name: record[name] for name in _SEAL})
    plain = {name: value for name, value in record.items() if name not in (*_SEAL, "sha256")}
    path.write_text(sealed_text(plain, seal))


def seal_of_weights(path):
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    notes = header["__metadata__"]
    return Seal(notes["kind"], notes["party"], notes["run"], int(notes["step"]))


def weights_at(path):
    """Weights in a file, whosever they are."""
    return load_weights(path, seal_of_weights(path))


def reseal_weights(path, change):
    """Change a state dict and seal it as before."""
    seal = seal_of_weights(path)
    state, _ = unpack_weights(path.read_bytes(), seal, path)
    change(state)
    path.write_bytes(pack_weights(state, seal))
