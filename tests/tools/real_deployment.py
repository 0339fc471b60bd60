"""A deployment of real commands: `vfl up` at every party and `vfl train`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import process_table

from vfl.core.storage import read_json, read_lines
from vfl.training import demo

SIDES = ("left", "right")


class Command:
    """A `vfl` command that runs, and all it has said so far."""

    def __init__(self, mark, name, *arguments):
        self.party = name.removeprefix("supernode-")
        self.log = Path(mark) / f"{name}.said"
        environment = {**os.environ, process_table.MARK: str(mark)}
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vfl", *map(str, arguments)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    @property
    def pid(self):
        return self._process.pid

    def poll(self):
        return self._process.poll()

    def resident_bytes(self):
        """Memory of its own process; 0 once that has ended."""
        status = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    def said(self):
        return self.log.read_text(errors="replace")

    def last_words(self):
        """Its last error with all its lines, or its last line."""
        lines = self.said().strip().splitlines()
        errors = [number for number, line in enumerate(lines) if line.startswith("error[")]
        own = errors and all(line.startswith("  ") for line in lines[errors[-1] + 1 :])
        return "\n".join(lines[errors[-1] :] if own else lines[-1:])

    def wait_for(self, text, timeout_s=300.0, after=0):
        """Block until it has said a text beyond a position; the position behind it."""
        deadline = time.monotonic() + timeout_s
        while (at := self.said().find(text, after)) < 0:
            assert time.monotonic() < deadline, f"'{text}' is not in: {self.said()}"
            assert self._process.poll() is None or text in self.said()[after:], self.said()
            time.sleep(0.05)
        return at + len(text)

    def wait(self, timeout_s=300.0):
        """Its exit code."""
        return self._process.wait(timeout_s)

    def stop(self):
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)


class Deployment:
    """A project with every command running; `close` ends them and looks what is left.

    It is the demo's, unless `write` writes another one and gives its label folder. With `ranks`
    every party runs so many.
    """

    def __init__(self, folder, *settings, sides=SIDES, write=demo.write_demo, ranks=None):
        self._up = ("up",) if ranks is None else ("up", "--ranks", ranks)
        self.folder, self.sides = Path(folder), sides
        self.label = write(self.folder, ["federation.join_timeout_s=90.0", *settings])
        self.nodes = {}
        self.trainings = self.asked = 0
        self.superlink = None
        self._commands = []

    def start(self):
        self.start_superlink()
        for side in self.sides:
            self.start_supernode(side)
        for node in self.nodes.values():
            node.wait_for("is connected")
        return self

    def command(self, name, *arguments):
        self._commands.append(Command(self.folder, name, *arguments))
        return self._commands[-1]

    def start_superlink(self):
        before = len(self.superlink.said()) if self.superlink else 0
        self.superlink = self.command("superlink", *self._up, self.folder)
        self.superlink.wait_for("listens on", after=before)

    def start_supernode(self, side):
        file = self.folder / side / "party.toml"
        self.nodes[side] = self.command(f"supernode-{side}", *self._up, file)

    def train(self, *settings, resume=None):
        options = [part for text in settings for part in ("-s", text)]
        if resume is not None:
            options += ["--resume", self.run(resume)]
        self.trainings += 1
        return self.command(f"train-{self.trainings}", "train", self.folder, *options)

    def trained(self, *settings, resume=None):
        """A training that has ended well."""
        training = self.train(*settings, resume=resume)
        assert training.wait() == 0, training.said()
        return training

    def done(self, what, *arguments):
        """Another command of the label party that has ended well."""
        command = self.ask(what, *arguments)
        assert command.wait() == 0, command.said()
        return command

    def ask(self, what, *arguments):
        """Another command of the label party."""
        self.asked += 1
        return self.command(f"{what}-{self.asked}", what, *arguments)

    def run(self, training):
        """The folder of a training's run."""
        word = next(line for line in training.said().splitlines() if "ing run " in line)
        return self.label.path / "store" / "runs" / word.split()[-1]

    def kill(self, program, owner, number=signal.SIGKILL):
        return process_table.kill(self.folder, program, owner, number)

    def close(self):
        for command in sorted(self._commands, key=lambda command: command is self.superlink):
            command.stop()
        assert process_table.wait_until_gone(self.folder) == []


def results(run):
    """Losses of every epoch, digest of the weights and bytes: what no fault may change."""
    summary = read_json(run / "summary.json")
    losses = [record["train_loss"] for record in read_lines(run / "metrics.jsonl")]
    return losses, summary["weights_sha256"], summary["bytes_up"], summary["bytes_down"]


def finish(commands, training):
    """Let a training end well at everybody; what it gave."""
    assert training.wait() == 0, training.said()
    assert training.last_words().startswith("report ")
    run = commands.run(training)
    for node in commands.nodes.values():
        node.wait_for(f"has completed its part of {run.name}")
        assert node.last_words() == f"vfl: party {node.party} has completed its part of {run.name}"
    return results(run)
