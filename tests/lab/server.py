"""A JupyterLab server of its own, without any of the user's settings."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_SERVER_LIMIT_S = 60.0
_END_LIMIT_S = 60.0  # a session lingers for 20 s after its kernel
_POLL_S = 0.05

# Every cell in the DOM, no pop-up, no autosave: the page changes only when a test or a kernel changes it.
_SETTINGS = {
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none", "recordTiming": False},
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}
# The server exits if this process is killed before it could stop the server.
_WITH_US = """
import os, sys
from detrain_nb.node.system.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
_MARK = "DETRAIN_NB_LAB_TEST"  # in the environment of the server, and so of all that it and its kernels start


@dataclass(frozen=True)
class Lab:
    """A running server, and the folder that it serves."""

    url: str
    token: str
    root: Path
    mark: str

    def processes(self) -> set[psutil.Process]:
        """Return the server and every process that it, its kernels or their sessions have started."""
        return _marked_processes(self.mark)

    def end_kernel(self, path: str) -> None:
        """Stop the kernel of a notebook that no page shows any more; the server would restart a killed kernel."""
        for session in json.loads(self._ask("GET", "api/sessions")):
            if session["path"] == path:
                self._ask("DELETE", f"api/sessions/{session['id']}")

    def _ask(self, method: str, place: str) -> bytes:
        request = urllib.request.Request(f"{self.url}{place}?token={self.token}", method=method)
        with urllib.request.urlopen(request, timeout=_SERVER_LIMIT_S) as answer:
            said: bytes = answer.read()
        return said


@contextlib.contextmanager
def running_lab(base: Path, *, kernel_python: str | None = None) -> Iterator[Lab]:
    """Run a server that keeps all its files below ``base``, an empty folder; ``kernel_python`` runs its kernels."""
    root, settings = base / "root", base / "app-settings"
    for folder in (root, settings, base / "runtime"):
        folder.mkdir()
    if kernel_python:
        _write_kernel(base / "path" / "kernels" / "python3", kernel_python)
    (settings / "overrides.json").write_text(json.dumps(_SETTINGS), encoding="utf-8")
    token, mark = uuid.uuid4().hex, uuid.uuid4().hex
    options = [
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.port=0",
        f"--ServerApp.root_dir={root}",
        f"--IdentityProvider.token={token}",
        "--LabApp.expose_app_in_browser=True",
        "--JupyterNotebookApp.expose_app_in_browser=True",
        "--LabApp.extension_manager=readonly",
        f"--LabApp.app_settings_dir={settings}",
    ]
    with open(base / "server.log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", _WITH_US, str(os.getpid()), "-m", "jupyterlab", *options],
            env=_environment(base, mark),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = _wait_for_server(server, base / "runtime", token, base / "server.log")
        yield Lab(url, token, root, mark)
    finally:
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_END_LIMIT_S)
        for process in _marked_processes(mark):
            with contextlib.suppress(psutil.Error):
                process.kill()
        server.wait(_END_LIMIT_S)


def _write_kernel(folder: Path, python: str) -> None:
    argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3 (ipykernel)", "language": "python"}
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def _environment(base: Path, mark: str) -> dict[str, str]:
    """Return this process's environment without the user's Jupyter and IPython settings and without other sessions."""
    foreign = ("JUPYTER", "JPY_", "IPYTHON", "DETRAIN_NB_")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(foreign)},
        "JUPYTER_CONFIG_DIR": str(base / "config"),
        "JUPYTER_DATA_DIR": str(base / "data"),
        "JUPYTER_PATH": str(base / "path"),
        "JUPYTER_RUNTIME_DIR": str(base / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(base / "user-settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(base / "workspaces"),
        "IPYTHONDIR": str(base / "ipython"),
        "DETRAIN_NB_RUNTIME_DIR": str(base / "sessions"),
        "DETRAIN_NB_LINGER": "20",
        _MARK: mark,
    }


def _marked_processes(mark: str) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def _wait_for_server(server: subprocess.Popen[bytes], runtime: Path, token: str, log: Path) -> str:
    """Wait until the server answers; return its address."""
    deadline = time.monotonic() + _SERVER_LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with exit code {server.returncode}:\n{log.read_text()}")
        with contextlib.suppress(OSError, ValueError):  # its file is missing or incomplete
            url: str = json.loads((runtime / f"jpserver-{server.pid}.json").read_text(encoding="utf-8"))["url"]
            urllib.request.urlopen(f"{url}api/status?token={token}", timeout=_SERVER_LIMIT_S).close()
            return url
        time.sleep(_POLL_S)
    raise RuntimeError(f"JupyterLab did not answer within {_SERVER_LIMIT_S:g} s:\n{log.read_text()}")


def end(processes: set[psutil.Process]) -> list[str]:
    """Wait until the processes have exited; kill and return those that do not."""
    _, alive = psutil.wait_procs(processes, timeout=_END_LIMIT_S)
    names = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            names.append(f"{process.pid} {' '.join(process.cmdline())}")
            process.kill()
    return names
