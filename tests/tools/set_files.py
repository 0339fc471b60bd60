"""Files of named data sets, small, in the layouts that their authors publish."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from vfl.datasets.sources.pictures import LAYOUTS

WNIDS = ["n02", "n01", "n03"]


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_set(root: Path, folder: str, train: int, test: int, zipped: bool) -> np.ndarray:
    rng = np.random.default_rng(0)
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    pictures = rng.integers(0, 256, (train + test, 28, 28))
    labels = rng.integers(0, 10, train + test)
    for part, rows in (("train", slice(0, train)), ("t10k", slice(train, None))):
        for kind, array in (("images-idx3", pictures[rows]), ("labels-idx1", labels[rows])):
            cells = idx_bytes(array)
            path = raw / f"{part}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(cells) if zipped else cells)
    return pictures


def write_binary(root, source, train=10, test=4):
    """Random rows in the published layout; pictures and labels, training rows first."""
    layout = LAYOUTS[source]
    folder = root / layout.archive.folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = train + test
    labels = rng.integers(0, layout.classes, rows)
    pictures = rng.integers(0, 256, (rows, 3, 32, 32))
    coarse = 255 if source == "cifar100" else None  # never to be mistaken for the fine label
    cells = [
        bytes([coarse, label] if coarse else [label]) + picture.astype(np.uint8).tobytes()
        for label, picture in zip(labels.tolist(), pictures, strict=True)
    ]
    share = train // len(layout.train)
    for number, name in enumerate(layout.train):
        (folder / name).write_bytes(b"".join(cells[number * share : (number + 1) * share]))
    (folder / layout.test[0]).write_bytes(b"".join(cells[train:]))
    names = "\n".join(f"class {number}" for number in range(layout.classes))
    (folder / layout.names).write_text(names + "\n\n")
    return pictures, labels


def write_archives(root, wnids=WNIDS):
    folder = root / "tiny-imagenet-200"
    levels, labels = [10, 20, 30, 40, 50, 60], [0, 0, 1, 1, 2, 2]
    write_jpeg_archive(folder / "train_000_099.npz", levels, labels, {"wnid": WNIDS}, side=64)
    write_jpeg_archive(folder / "val.npz", [70, 80, 90], [0, 1, 2], {"wnid": wnids}, side=64)


def write_published(root):
    """The folder its authors publish: levels 10, 20, ... by class, and 70, 80, 90 to validate."""
    folder = root / "tiny-imagenet-200"
    for code, name in enumerate(WNIDS):
        images = folder / "train" / name / "images"
        images.mkdir(parents=True)
        for place, number in enumerate((2, 10)):  # sorted as texts, 10 would come first
            level = 10 + 20 * code + 10 * place
            (images / f"{name}_{number}.JPEG").write_bytes(flat_jpeg(level, 64))
    images = folder / "val" / "images"
    images.mkdir(parents=True)
    for place, level in enumerate((70, 80, 90)):
        (images / f"val_{place}.JPEG").write_bytes(flat_jpeg(level, 64))
    lines = [f"val_{place}.JPEG\t{name}\t0\t0\t62\t62" for place, name in enumerate(WNIDS)]
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")


def jpeg_of(pixels: np.ndarray) -> bytes:
    """One JPEG of pixels of axes (height, width) or (height, width, 3)."""
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG", quality=95)
    return file.getvalue()


def flat_jpeg(level: int, side: int) -> bytes:
    """A picture of one grey level, which JPEG keeps exactly."""
    return jpeg_of(np.full((side, side), level))


def write_jpeg_archive(
    path: Path, levels: list[int], labels: list[int], names: dict[str, list[str]], side: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [flat_jpeg(level, side) for level in levels]
    np.savez_compressed(
        path,
        jpeg=np.frombuffer(b"".join(files), np.uint8),
        offset=np.cumsum([0, *map(len, files)]),
        label=np.array(labels, np.uint8),
        **{key: np.array(value) for key, value in names.items()},
    )


def write_filtered(root, text="sessionId\tcategorys\titems\n3\t2,2\t0,4\n5\t1,1,1\t4,1,2\n"):
    folder = root / "yoochoose1_64"
    folder.mkdir(parents=True)
    for part in ("train", "valid", "test"):
        with gzip.open(folder / f"{part}.txt.gz", "wt") as file:
            file.write(text)


def clicks_of(sessions):
    """Lines as published, one session after another; times in minutes from a day on."""
    start = pd.Timestamp("2014-04-07T10:51:09.277Z")
    lines = [
        f"{session},{(start + pd.Timedelta(minutes=minute)).isoformat()[:23]}Z,{item},0"
        for session, clicks in sessions.items()
        for minute, item in clicks
    ]
    return "\n".join(lines) + "\n"


def write_clicks(root, text):
    (root / "yoochoose").mkdir()
    (root / "yoochoose" / "yoochoose-clicks.dat").write_text(text)


def write_reviews(root, texts):
    folder = root / "review-polarity"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "review_polarity.tar.gz", "w:gz") as archive:
        for name, text in texts.items():
            raw = text.encode("latin-1")
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))


def reviews_of(rows):
    side = {"neg": "a bad film", "pos": "a good caf\xe9"}
    return {
        f"txt_sentoken/{name}/cv{row:03}_{9 * row}.txt": f"{text} {name}{row}"
        for name, text in side.items()
        for row in range(rows)
    }


def write_articles(root):
    folder = root / "dbpedia-classes"
    folder.mkdir()
    for part, rows in (("train", 6), ("val", 2), ("test", 3)):
        labels = [("River", "Airport")[row % 2] for row in range(rows)]
        table = {"text": [f"NA, the {name}" for name in labels], "l1": "Place", "l3": labels}
        pd.DataFrame(table).to_csv(folder / f"DBPEDIA_{part}.csv", index=False)


def published_clicks():
    """640 sessions of items 900 and 500, numbered against time, and two that are dropped."""
    sessions = {}
    for place in range(640):
        items = [900, 500] if place % 2 else [500, 900, 500]
        clicks = [(10 * place + step, item) for step, item in enumerate(items)]
        sessions[10_000 - place] = [*clicks[:1], (10 * place + 5, 77 + place), *clicks[1:]]
    sessions[20_000] = [(99_999, 500)]  # one click, however late
    sessions[20_001] = [(99_998, 500), (99_999, 600)]  # one click once rare items are gone
    return clicks_of(sessions)


def write_every_set(root):
    """Every set that is read from files."""
    for folder in ("MNIST", "FashionMNIST"):
        write_set(root, folder, 60, 12, zipped=True)
    write_binary(root, "cifar10", 60, 12)
    write_binary(root, "cifar100", 400, 80)
    write_archives(root)
    write_filtered(root)
    write_clicks(root, published_clicks())
    write_reviews(root, reviews_of(20))
    write_articles(root)
