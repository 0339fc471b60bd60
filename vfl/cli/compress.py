"""``vfl compress``: what codecs would make of a cut, without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.output import Json, emit, say

if TYPE_CHECKING:
    from torch import Tensor


def compress(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="CUT.npy|CUT.npz|TRACE",
            help="A saved cut of axes (rows, width), or RUN/parties/PARTY with a trace.",
        ),
    ],
    codec: Annotated[
        list[str] | None,
        typer.Option("--codec", help="A codec such as topk:k=3,values=8; may be repeated."),
    ] = None,
    batch_rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of a frame; 256, or those of the training that was traced."),
    ] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Frames of predictions, a scale a row.")
    ] = False,
    array: Annotated[str | None, typer.Option(help="Which array of a .npz file.")] = None,
    party: Annotated[str | None, typer.Option(help="Whose cuts of a label party's trace.")] = None,
    json: Json = False,
) -> None:
    """Compare codecs on a saved cut or a trace: real frames, bound, error, times.

    Each frame is encoded, framed, checked and decoded. Without --codec, one or two of each kind
    are measured. A trace gives the training cuts of one feature party.
    """
    from vfl.bench.compress import bench_compress, default_specs, format_table
    from vfl.specs import check_codecs

    cut, recorded_rows = _cut_of(path, array, party)
    specs = codec or default_specs(cut.shape[1])
    check_codecs(specs, cut.shape[1], "--codec")
    frame_rows = recorded_rows if batch_rows is None else batch_rows
    rows = bench_compress(cut, specs, batch_rows=frame_rows, training=not inference, say=say)
    if json:
        emit([row.record() for row in rows])
    else:
        print(format_table(rows))


def _cut_of(path: Path, array: str | None, party: str | None) -> tuple[Tensor, int]:
    """The cut, and how many rows a frame has unless told."""
    from vfl.compression.cut_file import read_cut
    from vfl.errors import UserError
    from vfl.trace import TRACE, read, training_cuts

    folder = path.is_dir()
    if (party if not folder else array) is not None:
        option, kind = ("--array", "an .npz file") if folder else ("--party", "a trace")
        raise UserError(f"{option} is for {kind}", got=str(path), fix="leave it out")
    if not folder:
        return read_cut(path, array), 256
    recording = read(path / TRACE if (path / TRACE).is_dir() else path)
    if recording.terms.codec != "none":
        say(f"recorded with {recording.terms.codec}: these are cuts as that codec left them")
    return training_cuts(recording, party), recording.terms.train.batch_rows
