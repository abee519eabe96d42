"""A Flower deployment on this machine: a SuperLink, and a SuperNode per client, each its own process, over TLS.

It runs on loopback what ten hospitals would start on eleven hosts: for the notebook, for tests, and to copy from. The
certificate is signed by an authority made on the spot. With real clients, register their keys too.

Every message costs the start of a process. The SuperNode starts it, it imports PyTorch and reads its data, and Flower
cannot keep it alive. That takes five to six seconds of one core before anything is trained, so more local epochs are
cheaper than more rounds. `simulate` keeps its processes.
"""

import datetime
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pandas as pd
import psutil
import trustme

from ..engine import records
from ..engine.checkout import beside
from ..experiment import Experiment

APP = beside("pyproject.toml").parent  # with the pyproject.toml that `flwr run` reads
STARTING = 300  # seconds for a SuperLink to listen, on a busy machine


class Deployment:
    """`with Deployment(folder, clients=3) as d: d.run(exp, out)`; logs, certificates and Flower's state in `folder`."""

    def __init__(self, folder: str | Path, clients: int, data_dir: str | Path | None = None):
        self.folder, self.clients = Path(folder).resolve(), clients
        self.data_dir = str(Path(data_dir).expanduser().resolve()) if data_dir else ""
        self.home = self.folder / "flwr"
        self.home.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.authority, self.certificate, self.key = make_certificates(self.folder)
        connection = f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.authority}"\n'
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{connection}', "utf-8"
        )
        self.link: subprocess.Popen | None = None
        self.nodes: dict[int, subprocess.Popen] = {}

    def __enter__(self) -> "Deployment":
        try:
            self.start_link()
            for n in range(self.clients):
                self.start_node(n)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for process in [*self.nodes.values(), self.link]:
            kill(process)

    def start_link(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        tls = ["--ssl-certfile", self.certificate, "--ssl-keyfile", self.key, "--ssl-ca-certfile", self.authority]
        # With a database it recognises its nodes after a restart. Without one it would refuse them for good.
        self.link = self._start(
            "flower-superlink", *tls, "--host", "127.0.0.1", "--port", self.port, "--database", self.folder / "link.db",
            "--disable-runtime-dependency-installation", log="superlink",
        )  # fmt: skip
        deadline = time.monotonic() + STARTING
        while not listening(self.port):
            if self.link.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the SuperLink does not start; see {self.folder / 'superlink.log'}")
            time.sleep(0.2)

    def start_node(self, n: int) -> None:
        """Start the SuperNode of client n."""
        config = f"partition-id={n}" + (f' data-dir="{self.data_dir}"' if self.data_dir else "")
        self.nodes[n] = self._start(
            "flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--root-certificates", self.authority,
            "--port", free_port(), "--node-config", config, log=f"supernode-{n}",
        )  # fmt: skip

    def kill_node(self, n: int) -> None:
        """Kill a node and everything it has started, as a power cut would."""
        kill(self.nodes.pop(n))

    def kill_link(self) -> None:
        """Kill the SuperLink and everything it has started."""
        kill(self.link)

    def submit(self, exp: Experiment, out: str | Path, **config) -> int:
        """`flwr run` of an experiment, with these entries of the run configuration; returns its number."""
        whole = {"preset": "", "method": "", "dataset": "", "settings": json.dumps(exp.changed())}
        config |= whole | {"out": str(Path(out).resolve()), "data_dir": self.data_dir}
        file = self.folder / "run.toml"
        file.write_text("".join(f"{k.replace('_', '-')} = {json.dumps(v)}\n" for k, v in config.items()), "utf-8")
        return int(self._flwr("run", APP, "here", "--run-config", file)["run-id"])

    def ended(self, number: int) -> bool:
        """Whether Flower says that the run has ended; RuntimeError with the server's traceback if it has failed."""
        status = self._flwr("list", "here", "--run-id", number)["runs"][0]["status"]
        if status.startswith("finished") and "completed" not in status:
            said = self._command("log", number, "here", "--show").stdout
            said = said[max(0, said.find("Traceback")) :]
            raise RuntimeError(f"the run {number} ended as {status}; its server says:\n{said}")
        return status.startswith("finished")

    def run(self, exp: Experiment, out: str | Path, within: float = 600, **config) -> pd.DataFrame:
        """Submit, wait until the record is whole, and return its metrics."""
        out, deadline = Path(out).resolve(), time.monotonic() + within
        number, looked = self.submit(exp, out, **config), time.monotonic()
        while not records.progress(exp, out)[1]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{exp.run_id} is not done after {within:g} s; logs are in {self.folder}")
            # Flower's command takes seconds to start, so it is asked only now and then whether the run has failed.
            if time.monotonic() - looked > 30:
                if self.ended(number) and not records.progress(exp, out)[1]:
                    raise RuntimeError(f"{exp.run_id} has ended without its last round; see {self.folder}")
                looked = time.monotonic()
            time.sleep(0.5)
        return records.load_run(records.folder_of(exp, out))

    def _flwr(self, *words) -> dict:
        """The answer of Flower's command."""
        done = self._command(*words, "--format", "json")
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            answer = {"error-message": f"{done.stdout}\n{done.stderr}"}
        if done.returncode or not answer.get("success"):
            raise RuntimeError(f"flwr {words[0]} failed: {answer.get('error-message')}")
        return answer

    def _command(self, *words) -> subprocess.CompletedProcess:
        return subprocess.run(
            [tool("flwr"), *map(str, words)],
            capture_output=True, encoding="utf-8", errors="replace", env=self._environment(), cwd=self.folder,
            timeout=600,
        )  # fmt: skip

    def _start(self, name: str, *words, log: str) -> subprocess.Popen:
        with open(self.folder / f"{log}.log", "ab") as file:
            # In its own session: Ctrl-C must reach only the process that started the deployment.
            return subprocess.Popen(
                [tool(name), *map(str, words)], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=self._environment(), cwd=self.folder, start_new_session=True,
            )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        # Its own state, this very package, one thread for each of the many processes, and JSON without the colours that
        # a notebook asks for.
        path = os.pathsep.join([str(APP), *filter(None, [os.environ.get("PYTHONPATH")])])
        here = {"FLWR_HOME": str(self.home), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        here |= {"NO_COLOR": "1", "FORCE_COLOR": "", "CLICOLOR_FORCE": ""}
        return os.environ | here | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def tool(name: str) -> str:
    """The path of a command that is installed beside this Python."""
    return str(Path(sys.executable).parent / name)


def kill(process: subprocess.Popen | None) -> None:
    """Kill a process and everything it has started."""
    if process is None:
        return
    with suppress(psutil.NoSuchProcess):
        for victim in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
    process.wait()


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def listening(port: int) -> bool:
    """Whether somebody listens at a port of this machine."""
    with socket.socket() as s:
        s.settimeout(1)
        return s.connect_ex(("127.0.0.1", port)) == 0


def make_certificates(
    folder: str | Path, hosts: Iterable[str] = ("127.0.0.1",), days: int = 7
) -> tuple[Path, Path, Path]:
    """A certificate for a server with these names or addresses: the paths of its authority, certificate and key."""
    authority, certificate, key = (Path(folder) / name for name in ("authority.crt", "superlink.crt", "superlink.key"))
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    signer = trustme.CA(organization_name="FedDIP")  # its own key is forgotten: it signs this one and no other
    signed = signer.issue_cert(*hosts, organization_name="FedDIP", not_after=until)
    signer.cert_pem.write_to_path(authority)
    signed.cert_chain_pems[0].write_to_path(certificate)
    key.touch(mode=0o600)
    signed.private_key_pem.write_to_path(key)
    return authority, certificate, key
