"""Hosts of their own on this machine: a network namespace, an address, a folder and a user each.

They share a link, a bridge in a namespace of its own, and nothing else. A host cannot read another
one's folder, and root's home, where the interpreter may lie, is hidden from it but for that.
"""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import vfl

REPOSITORY = Path(vfl.__file__).parents[1]
_NETWORK = "10.77.0"
_FIRST_USER = 51_000
#: Shows the interpreter to a user who may not enter root's home, in this process's mounts alone.
_MOUNTS = """\
set -e
mount --make-rprivate /
case "$1" in /root/*)
  mount --bind "$1" /mnt
  mount -t tmpfs -o mode=755 none /root
  mkdir -p "$1"
  mount --move /mnt "$1" ;;
esac
shift
exec "$@"
"""


def why_not():
    """Why hosts cannot be made here; None where they can."""
    if os.getuid() != 0:
        return "only root can make network namespaces and act as other users"
    missing = [tool for tool in ("ip", "ss", "unshare", "setpriv") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    made = subprocess.run(["ip", "netns", "add", name := f"vfl-{secrets.token_hex(3)}"])
    if made.returncode:
        return "this system gives no network namespaces"
    _run("ip", "netns", "del", name)
    return None


def _run(*arguments):
    subprocess.run(list(map(str, arguments)), check=True, capture_output=True)


class Host:
    """One host: its namespace, its address, its folder and its user."""

    def __init__(self, name, number, mark, folder):
        self.name, self.address = name, f"{_NETWORK}.{number}"
        self.namespace, self.user = f"vfl-{mark}-{name}", _FIRST_USER + number
        self.folder = folder / name
        self.folder.mkdir(mode=0o700)
        os.chown(self.folder, self.user, self.user)
        self._running = []

    def command(self, *arguments):
        """A command line that runs here, as this host's user, in its folder."""
        inside = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        inside += ["--no-new-privs", "--", *map(str, arguments)]
        shell = ["unshare", "--mount", "/bin/sh", "-c", _MOUNTS, "sh", sys.base_prefix, *inside]
        return ["ip", "netns", "exec", self.namespace, *shell]

    def _options(self):
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        environment = {"PATH": path, "HOME": str(self.folder), "PYTHONPATH": str(REPOSITORY)}
        environment |= {"USER": self.name, "TMPDIR": str(self.folder)}  # a user without an account
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "VFL_COMPILED": "0"}
        return {"env": environment, "cwd": self.folder, "umask": 0}

    def run(self, *arguments, timeout=300):
        """Run a command of this host to its end."""
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            **self._options(),
        )

    def vfl(self, *arguments):
        """Run a vfl command that is to succeed; what it printed."""
        done = self.run(sys.executable, "-m", "vfl", *arguments)
        assert done.returncode == 0, f"vfl {arguments}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def json(self, *arguments):
        """Run a vfl command that is to succeed and prints JSON on standard output; that."""
        done = self.run(sys.executable, "-m", "vfl", *arguments)
        assert done.returncode == 0, f"vfl {arguments}: {done.stdout}{done.stderr}"
        return json.loads(done.stdout)

    def start(self, marker, *arguments, timeout_s=120):
        """Start a vfl command, or that of an interpreter, and wait until it says it is ready.

        Returns:
            Its process, with an id of its own.
        """
        named = arguments[0] != sys.executable
        line = (sys.executable, "-m", "vfl", *arguments) if named else arguments
        log = self.folder / f"{Path(arguments[not named]).stem}.said"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(*line),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                **self._options(),
            )
        self._running.append(process)
        deadline = time.monotonic() + timeout_s
        while marker not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.1)
        return process

    def write(self, name, text):
        """Its user writes a file."""
        path = self.folder / name
        before = path.with_name(f".{path.name}.new")
        before.write_text(text, encoding="utf-8")
        before.chmod(0o600)
        os.chown(before, self.user, self.user)
        before.replace(path)

    def take(self, source, name):
        """Put a folder or a file here that its owner was given."""
        put = self.folder / name
        if source.is_dir():
            shutil.copytree(source, put)
        elif not put.parent.exists():
            put.parent.mkdir()
            os.chown(put.parent, self.user, self.user)
        if source.is_file():
            shutil.copy(source, put)
        for path in [put, *put.rglob("*")]:
            os.chown(path, self.user, self.user)

    def ports(self):
        """Ports that other hosts could reach: whatever listens beyond the loopback."""
        listing = subprocess.run(
            ["ip", "netns", "exec", self.namespace, "ss", "-ltnH"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        ends = [line.split()[3] for line in listing.splitlines()]
        return sorted(end for end in ends if not end.startswith(("127.", "[::1]")))

    def stop(self):
        """End what runs here, by its own process id; the commands take along what they started."""
        for process in self._running:
            if process.poll() is None:
                process.terminate()
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            if process.poll() is None:
                process.kill()
                process.wait()


@contextlib.contextmanager
def hosts(*names):
    """Hosts of these names on one link; everything is removed afterwards, whatever happens."""
    mark = secrets.token_hex(3)
    switch = f"vfl-{mark}"
    made = []
    with tempfile.TemporaryDirectory(prefix="vfl-hosts-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        try:
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "br0", "up")
            for number, each in enumerate(names, start=1):
                host = Host(each, number, mark, folder)
                _run("ip", "netns", "add", host.namespace)
                made.append(host)
                port = f"port{number}"
                _run("ip", "-n", switch, "link", "add", port, "type", "veth",
                     "peer", "name", "eth0", "netns", host.namespace)  # fmt: skip
                _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
                own = ("ip", "-n", host.namespace)
                _run(*own, "addr", "add", f"{host.address}/24", "dev", "eth0")
                _run(*own, "link", "set", "eth0", "up")
                _run(*own, "link", "set", "lo", "up")
            yield made
        finally:
            for host in made:
                host.stop()
            for namespace in [*(host.namespace for host in made), switch]:
                subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
