"""Randomness: public draws from the run's seed, and private draws from a party's secret key.

Public choices, such as batch order and splits, derive from the run's seed, which every party has.
Draws that protect data, such as noise, derive from a `Secret`, which one party owns and no message
contains. A training uses torch's global generator only inside `scoped` blocks. If the process also
calls `use_one_thread`, a run gives the same bits each time.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from vfl.core.errors import RunFolderError
from vfl.core.storage import write_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SECRET_BYTES = 32


def derive(seed: int, *purpose: str | int) -> int:
    """Derive a 63-bit number from a public seed; each purpose gives a different number.

    >>> derive(0, "order", 1) == derive(0, "order", 1)
    True
    >>> derive(0, "order", 1) == derive(0, "order", 2)
    False
    """
    text = "\x1f".join([str(seed), *map(str, purpose)]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Make a torch generator from a public seed; each purpose gives different draws."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *purpose))


def permutation(seed: int, rows: int, *purpose: str | int) -> np.ndarray:
    """Draw a permutation of ``range(rows)``; every party with the same seed draws the same one.

    The permutation is int64 of axes (rows,).
    """
    import torch

    draw = generator(seed, *purpose)
    order: np.ndarray = torch.randperm(rows, generator=draw, device="cpu").numpy()
    return order


def use_one_thread() -> None:
    """Use one torch thread.

    Several parties share one machine, and with more threads the order of floating-point additions
    would vary.
    """
    import torch

    torch.set_num_threads(1)


#: Lock that a thread holds while a `scoped` block uses the global generator; the same thread may
#: enter a second block inside the first.
_GLOBAL_GENERATOR = threading.RLock()


class scoped:
    """Run a block with torch's global generator seeded by `key`; then restore its former state.

    Only one thread at a time can be inside a block, because all threads share the global generator.
    Therefore a block must not wait for another thread.

    `scoped` is a class because a training step enters three such blocks, and `contextmanager` would
    be too slow.
    """

    __slots__ = ("_before", "_before_cuda", "_key")

    def __init__(self, key: int) -> None:
        self._key = key
        self._before_cuda: list[Tensor] | None = None

    def __enter__(self) -> None:
        import torch

        _GLOBAL_GENERATOR.acquire()
        self._before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self._key)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._before_cuda = torch.cuda.get_rng_state_all()
            torch.cuda.manual_seed_all(self._key)

    def __exit__(self, *error: object) -> None:
        import torch

        torch.default_generator.set_state(self._before)
        if self._before_cuda is not None:
            torch.cuda.set_rng_state_all(self._before_cuda)
        _GLOBAL_GENERATOR.release()


def fingerprint(rows: Tensor) -> str:
    """Return a text that is equal for two tensors only if all their values are equal.

    The draws of noise depend on this text, and thus on the rows. If a step were repeated with
    different rows after a restart or in another session, equal noise in both steps would disclose
    the difference between the rows.
    """
    return hashlib.sha256(rows.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


class Secret:
    """A 32-byte key of one party, and the random streams that are derived from the key.

    Every stream belongs to one purpose; streams of different purposes have different keys. The
    key's bytes are not in `repr`, comparisons of secrets take constant time, and the object refuses
    pickling.
    """

    __slots__ = ("_bytes",)

    def __init__(self, raw: bytes) -> None:
        if len(raw) != SECRET_BYTES:
            raise ValueError(f"a party secret has {SECRET_BYTES} bytes")
        self._bytes = bytes(raw)

    @classmethod
    def fresh(cls) -> Secret:
        """Draw a new secret from the operating system's random generator."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    def keep_at(self, path: Path) -> None:
        """Write the secret to a file that only its owner may read."""
        write_bytes(path, self._bytes)

    @classmethod
    def kept_at(cls, path: Path) -> Secret:
        """Load the secret from a file; if there is no file, draw a new secret and write it.

        Raises:
            RunFolderError: the file does not contain a secret of the right length.
        """
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            cls.fresh().keep_at(path)
            raw = path.read_bytes()
        if len(raw) != SECRET_BYTES:
            raise RunFolderError(
                "a party's secret is damaged", where=str(path), want=f"{SECRET_BYTES} bytes"
            )
        return cls(raw)

    @classmethod
    def of_simulation(cls, seed: int, party: str) -> Secret:
        """Derive a secret from a public seed, for one process that runs all parties.

        The derived secret protects no data, because anyone with the seed can compute it. Sessions
        with real parties never use it.
        """
        return cls(hashlib.blake2b(f"{seed}\x1f{party}".encode(), digest_size=32).digest())

    def key(self, *purpose: str | int) -> bytes:
        """Derive a 32-byte key for one purpose."""
        text = "\x1f".join(map(str, purpose)).encode()
        return hmac.digest(self._bytes, text, "sha256")

    def number(self, *purpose: str | int) -> int:
        """Derive a 63-bit number for one purpose, for example to seed a private generator."""
        return int.from_bytes(self.key(*purpose)[:8], "little") >> 1

    def stream(self, count: int, *purpose: str | int) -> bytes:
        """Return the first `count` bytes of the AES-256-CTR key stream for one purpose."""
        cipher = Cipher(algorithms.AES(self.key(*purpose)), modes.CTR(bytes(16)))
        return cipher.encryptor().update(bytes(count))

    def words(self, count: int, *purpose: str | int) -> npt.NDArray[np.int64]:
        """Return `count` 64-bit integers from the `stream` of one purpose, in writable memory."""
        # `update_into` needs memory for one more cipher block.
        found = np.empty(8 * count + 15, np.uint8)
        cipher = Cipher(algorithms.AES(self.key(*purpose)), modes.CTR(bytes(16)))
        cipher.encryptor().update_into(bytes(8 * count), found.data)
        return found[: 8 * count].view("<i8")

    def tag(self, values: npt.NDArray[Any], *purpose: str | int) -> str:
        """Return a text that is equal for two arrays only if all their bytes are equal.

        Only the owner of the secret can compute it: The text is a GMAC of AES-256 (NIST SP
        800-38D), which is used in the derivation of a key and is never disclosed.
        """
        cipher = Cipher(algorithms.AES(self.key("tag", *purpose)), modes.GCM(bytes(12)))
        tagging = cipher.encryptor()
        tagging.authenticate_additional_data(np.ascontiguousarray(values).view(np.uint8).data)
        tagging.finalize()
        return tagging.tag.hex()

    def uniform(self, shape: tuple[int, ...], *purpose: str | int) -> np.ndarray:
        """Draw uniform numbers on [0, 1) with 53 random bits each; float64 of `shape`.

        Row r of a two-dimensional draw does not depend on how many rows follow it.
        """
        words = np.frombuffer(self.stream(8 * math.prod(shape), *purpose), dtype="<u8")
        return _unit(words).reshape(shape)

    def uniform_rows(
        self, rows: npt.NDArray[np.int64], width: int, *purpose: str | int
    ) -> np.ndarray:
        """Return selected rows of a `uniform` draw, and compute only these rows.

        The CTR key stream is the encryption of consecutive block numbers, so each block of it can
        be computed alone; a block yields two draws.
        """
        starts = rows[:, None] * width
        blocks = np.zeros((len(rows), width // 2 + 1, 2), ">u8")
        blocks[:, :, 1] = starts // 2 + np.arange(width // 2 + 1)
        cipher = Cipher(algorithms.AES(self.key(*purpose)), modes.ECB())
        words = np.frombuffer(cipher.encryptor().update(blocks.tobytes()), "<u8")
        words = words.reshape(len(rows), width // 2 * 2 + 2)
        return _unit(np.where(starts % 2, words[:, 1 : width + 1], words[:, :width]))

    def normal(self, shape: tuple[int, ...], *purpose: str | int) -> np.ndarray:
        """Draw standard normal numbers; float64 of `shape`.

        From each Box-Muller pair (1958, eq. 1) the function uses one number, of magnitude up to
        10.3; see `log_unit`. Row r does not depend on the rows after it; see `uniform`.
        """
        words = np.frombuffer(self.stream(16 * math.prod(shape), *purpose), dtype="<u8")
        words = words.reshape(*shape, 2)
        radius = np.sqrt(-2 * log_unit(words[..., 0], words[..., 1]))
        normal: np.ndarray = radius * np.cos(2 * np.pi * _unit(words[..., 1]))
        return normal

    def laplace(self, shape: tuple[int, ...], *purpose: str | int) -> np.ndarray:
        """Draw Laplace numbers of scale 1 (variance 2), magnitude up to 52.7; float64 of `shape`.

        See `log_unit`. Row r does not depend on the rows after it; see `uniform`.
        """
        words = np.frombuffer(self.stream(16 * math.prod(shape), *purpose), dtype="<u8")
        words = words.reshape(*shape, 2)
        sizes = log_unit(words[..., 0], words[..., 1])
        laplace: np.ndarray = np.copysign(sizes, _unit(words[..., 1]) - 0.5)
        return laplace

    def discrete_normal(self, count: int, deviation: float, *purpose: str | int) -> np.ndarray:
        """Draw integers from the discrete Gaussian distribution; int64, axes (count,).

        An integer x has a probability proportional to exp(-x^2 / (2 deviation^2)). Canonne, Kamath
        and Steinke 2020, algorithms 2 and 3: two-sided geometric draws with rejection. Each
        rejection test uses 53 random bits.

        Args:
            count: number of draws.
            deviation: parameter `deviation` of the distribution, close to the standard deviation; 1
                to 2^40.
            purpose: see `stream`.
        """
        if not 1 <= deviation <= 2**40:
            raise ValueError("the deviation of integer draws is 1 to 2^40")
        scale, found, drawn = math.floor(deviation) + 1, np.empty(0, np.int64), 0
        while len(found) < count:
            # About a third of the candidates are accepted.
            draws = np.frombuffer(
                self.stream(40 * (4 * (count - len(found)) + 64), *purpose, drawn), "<u8"
            ).reshape(5, -1)
            drawn += 1
            # The modulo changes the probabilities by at most about 2^-23 of their value.
            inside = (draws[0] % np.uint64(scale)).astype(np.int64)
            runs = np.floor(-np.log1p(-_unit(draws[1]))).astype(np.int64)
            sizes = inside + scale * runs
            negative = (draws[2] >> np.uint64(63)).astype(bool)
            taken = _unit(draws[3]) < np.exp(-inside / scale)
            taken &= ~(negative & (sizes == 0))
            excess = (sizes - deviation**2 / scale) / deviation
            taken &= _unit(draws[4]) < np.exp(-(excess**2) / 2)
            found = np.append(found, np.where(negative, -sizes, sizes)[taken])
        return found[:count]

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._bytes, other._bytes)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> str:
        raise TypeError("a party secret is never serialised")

    def __deepcopy__(self, memo: object) -> Secret:
        """Return the same object; thus a copied model keeps its party's secret."""
        return self


def log_unit(words: npt.NDArray[np.uint64], others: npt.NDArray[np.uint64]) -> np.ndarray:
    """Return logarithms of uniform draws on (0, 1) that have 75 random bits each.

    Draws near 0 become the tail of a noise distribution. With only 53 bits, the gaps in the tail
    are wider than the grid to which noise is rounded: beyond 6.7 standard deviations of normal
    noise, or 24 scales of Laplace noise, a noisy sum would disclose the sum below the noise.

    Args:
        words: words of 64 random bits, one for each draw; a draw uses their upper 53 bits and their
            lower 11 bits.
        others: further 64-bit words, one for each draw; a draw uses their lower 11 bits, which must
            serve no other purpose.
    """
    spare = ((words & np.uint64(2047)) << np.uint64(11)) | (others & np.uint64(2047))
    above = np.uint64(1 << 53) - (words >> np.uint64(11))
    logs: np.ndarray = np.log((above - (spare + 0.5) * 2.0**-22) * 2.0**-53)
    return logs


def _unit(words: npt.NDArray[np.uint64]) -> np.ndarray:
    """Convert the upper 53 bits of 64-bit words to numbers in [0, 1)."""
    unit: np.ndarray = (words >> np.uint64(11)) * 2.0**-53
    return unit
