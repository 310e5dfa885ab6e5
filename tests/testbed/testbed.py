#!/usr/bin/env python3
"""Several SSH hosts on one Linux machine, each with a real OpenSSH server: for tests, and by hand.

    testbed.py [-p PREFIX] up N [--delay 20ms --rate 100mbit --loss 1%] [--share FOLDER] [--disk 64m] [--ttl 600] ...
    testbed.py [-p PREFIX] list | down                 `up` prints the inventory as JSON, `list` prints it again
    testbed.py [-p PREFIX] exec HOST COMMAND [ARG...]  run inside the host, without SSH
    testbed.py [-p PREFIX] processes | listening HOST  look into it
    testbed.py [-p PREFIX] cut | heal HOST [PEER...]   silent partition; PEER: a host or "notebook", default all
    testbed.py [-p PREFIX] shape HOST [--delay ...]    change the link, if `up` had a link option
    testbed.py [-p PREFIX] stop-sshd HOST [--sessions] | start-sshd HOST | kill-sessions HOST | reboot HOST

--mode netns (default; root): a host is a set of network, pid, mount, uts and ipc namespaces with its own host name,
/etc/hosts, processes, home, /tmp, /run and /dev/shm; the rest of the file system is shared. A veth pair plugs it into
the bridge PREFIX-br, which is "notebook", 198.18.K.1/24. With a link option the cable is two TAP devices and a relay,
because not every kernel has netem. --delay is one way: a round trip is 2x to the notebook, 4x between hosts.
--mode loopback (no root): one sshd per 127.K.0.x, port 2222; a home of its own, nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

if __package__:
    from . import machine, procfs
    from .inventory import Host, Inventory, Link, Mode, OwnName, parse_link
    from .machine import TestbedError
else:  # run by its path, as a program
    import machine
    import procfs
    from inventory import Host, Inventory, Link, Mode, OwnName, parse_link
    from machine import TestbedError

__all__ = ["Host", "Inventory", "Link", "Testbed", "TestbedError", "parse_link", "unavailable"]

_HOSTPROC = Path(__file__).resolve().with_name("hostproc.py")
_NOWHERE = "02:00:00:00:00:00"  # a hardware address that no device has: frames to it are lost without an error
_COMMAND_LIMIT_S = 60.0
_END_LIMIT_S = 30.0


def unavailable(mode: Mode = "netns", *, has_link: bool = False) -> str | None:
    """Return why this machine cannot run a testbed, or one whose links have a delay, a rate or a loss; or None."""
    tools = ["sshd", "ssh-keygen"] + ["ip", "unshare", "nsenter"] * (mode == "netns")
    if missing := [tool for tool in tools if not machine.find_tool(tool)]:
        packages = "openssh-server iproute2 util-linux"
        return f"testbed: no {' and no '.join(missing)} here: run 'apt-get install {packages}' as root"
    if mode == "loopback":
        return None
    if os.getuid() != 0:
        return "testbed: not root, so no network namespaces (mode loopback does without)"
    devices = "ip link add name b type bridge && ip link add name v type veth peer name w"
    probe = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "sh", "-c", devices]
    try:
        machine.run(*probe)
    except TestbedError as exc:
        why = str(exc).removeprefix(f"{' '.join(probe)}: ")
        return f"testbed: namespaces with a network are not permitted here (a container without CAP_SYS_ADMIN?): {why}"
    if has_link and not Path("/dev/net/tun").exists():
        return "testbed: no /dev/net/tun here, so no link with a delay, a rate or a loss"
    return None


class Testbed:
    """One testbed; several with different prefixes may be up at the same time.

    The state is in the inventory and in pid files: any process may call the methods, not only the one that called `up`.
    All of them raise TestbedError on failure. ``name`` is that of a host, such as "h0".
    """

    __test__ = False

    def __init__(self, prefix: str = "tb") -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]{0,7}", prefix):
            raise TestbedError(f"prefix {prefix!r} names devices: want 1 to 8 of a-z and 0-9, a letter first")
        self.prefix = prefix
        self.folder = machine.find_base() / prefix
        self._bridge = f"{prefix}-br"
        self._helpers: dict[str, subprocess.Popen[bytes]] = {}  # the helpers that this process started and must reap

    # Up and down

    def up(
        self,
        num_hosts: int,
        *,
        mode: Mode = "netns",
        link: Link | None = None,
        share: Iterable[str | Path] = (),
        disk: str | None = None,
        ttl_s: float = 0.0,
        owner_pid: int | None = None,
        own_name: OwnName = "address",
        sshd_options: Sequence[str] = (),
    ) -> Inventory:
        """Start hosts h0, h1, ...; an older testbed with this prefix goes down first.

        link: a delay, a rate, a loss; `shape` can only change it if one is given. share: folders below the home or /tmp
        that the hosts see too, like this Python. disk: the size of the home and of /tmp, such as "64m"; both are then
        in memory and do not survive a reboot. ttl_s, owner_pid: the testbed goes down by itself after that time, or
        when that process has exited. own_name: the address to which a host's own name resolves on that host.
        sshd_options: lines of sshd_config that are placed before ours and therefore override them.
        """
        _check_options(num_hosts, mode, link, disk, own_name)
        try:
            with machine.lock_base():
                self._remove()
                self.folder.mkdir(mode=0o700)
                hosts = self._plan_hosts(num_hosts, mode)
                inventory = Inventory(
                    id=uuid.uuid4().hex,
                    prefix=self.prefix,
                    mode=mode,
                    notebook_ip=hosts[0].ip.rpartition(".")[0] + ".1",
                    notebook_mac=hosts[0].mac.rpartition(":")[0] + ":01",
                    hosts=hosts,
                    link=link,
                    share=machine.find_folders([self.folder, *machine.list_folders_of_python(), *share]),
                    disk=disk,
                    ttl_s=ttl_s,
                    owner_pid=owner_pid,
                    own_name=own_name,
                    user_home=pwd.getpwuid(os.getuid()).pw_dir,
                    ssh_config=str(self.folder / "ssh_config"),
                )
                self._begin(inventory)
            for host in self.hosts:
                self._prepare(host, sshd_options)
            for host in self.hosts:
                if mode == "netns":
                    self._boot(host.name)
                else:
                    self.start_sshd(host.name)
        except BaseException:
            self.down()
            raise
        return self.inventory

    def down(self) -> None:
        """Remove everything. No error if nothing is up, or if the caller of `up` was killed half-way."""
        with machine.lock_base():
            self._remove()

    def keep(self, inventory_id: str) -> None:
        """Wait until this testbed's time is over or its owner has exited, then take it down. `up` starts this."""
        inventory = self.inventory
        try:
            owner = [os.pidfd_open(inventory.owner_pid)] if inventory.owner_pid else []
        except ProcessLookupError:
            pass
        else:
            select.select(owner, [], [], inventory.ttl_s or None)
        with machine.lock_base():  # an `up` with our prefix may have been faster
            if self.folder.exists() and self.inventory.id == inventory_id:
                self._remove()

    def repair(self) -> None:
        """Undo cut, shape, stop_sshd, set_own_name and the death of a host. Files and processes stay."""
        inventory = self.inventory
        for host in inventory.hosts if inventory.mode == "netns" else ():
            if not self.is_up(host.name):
                self.reboot(host.name)
            self.heal(host.name)
            self.set_own_name(host.name, inventory.own_name)
            if inventory.link:
                self.shape(host.name, inventory.link)
        for host in inventory.hosts:
            if not self._find_sshd(host, listening=True):
                self.start_sshd(host.name)

    # State

    @property
    def inventory(self) -> Inventory:
        """The testbed that `up` made, in this process or another; raises TestbedError if nothing is up."""
        try:
            return Inventory.from_json((self.folder / "inventory.json").read_text())
        except FileNotFoundError:
            raise TestbedError(f"testbed {self.prefix!r} is not up") from None

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.inventory.hosts

    def host(self, name: str) -> Host:
        hosts = {host.name: host for host in self.hosts}
        if name not in hosts:
            raise TestbedError(f"no host {name!r} among {', '.join(hosts)}")
        return hosts[name]

    def pid(self, name: str) -> int | None:
        """Return the outer pid of a host's pid 1; None if it has exited, and all processes of the host with it."""
        return self._helper_pid(f"{self._netns_host(name).name}/init")

    def is_up(self, name: str) -> bool:
        """Return whether a host is running and its cable is connected."""
        has_cable = self.inventory.link is None or self._helper_pid(f"{name}/relay") is not None
        return self.pid(name) is not None and has_cable

    def path_home(self, name: str) -> Path:
        """Return the path of a host's home in the real file system."""
        if self.inventory.disk:
            raise TestbedError(f"the home of {self.host(name).name} is in memory (disk): look at it through exec")
        return self._path(name) / "home"

    def known_hosts(self, name: str) -> str:
        """Return the line of known_hosts with this host's public key."""
        host = self.host(name)
        where = host.ip if host.port == 22 else f"[{host.ip}]:{host.port}"
        kind, key, *_ = (self._path(name) / "hostkey.pub").read_text().split()
        return f"{where} {kind} {key}\n"

    def processes(self, name: str) -> dict[int, list[str]]:
        """Return the argv of all processes of a host by pid, as the host itself sees them; zombies are omitted."""
        return procfs.read_argvs(Path(f"/proc/{self._pid_of_running(name)}/root/proc"))

    def listening(self, name: str) -> list[tuple[str, int]]:
        """Return the address and port of every listening TCP socket of a host."""
        sockets = procfs.read_tcp_sockets(self._pid_of_running(name))
        return sorted({(tcp.address, tcp.port) for tcp in sockets if tcp.is_listening})

    # Running something inside

    def enter(self, name: str, *kinds: str) -> list[str]:
        """Return the first words of an argv that runs the rest in a host's namespaces: all, or "--net" and the like."""
        if self.inventory.mode == "loopback":
            return []
        namespaces = kinds or ("--mount", "--uts", "--ipc", "--net", "--pid")
        return ["nsenter", f"--target={self._pid_of_running(name)}", *namespaces]

    def exec(
        self, name: str, *command: str, timeout_s: float | None = _COMMAND_LIMIT_S, **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command in a host's home, without SSH: one argument is a shell command, several are an argv.

        ``options`` are those of subprocess.run. After a TimeoutExpired the command may keep running as long as the
        host.
        """
        home = self._path(name) / "home" if self.inventory.mode == "loopback" else self.inventory.user_home
        argv = ["sh", "-c", *command] if len(command) == 1 else command
        return subprocess.run(
            [*self.enter(name), "sh", "-c", 'cd && exec "$@"', "sh", *argv],
            env={"PATH": machine.tool_path(), "HOME": str(home), "LANG": "C.UTF-8"},
            timeout=timeout_s,
            **options,
        )

    def output(self, name: str, *command: str, timeout_s: float = _COMMAND_LIMIT_S) -> str:
        """Run a command as `exec` does and return its output. Raises: TestbedError if its status is not 0."""
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = self.exec(name, *command, timeout_s=timeout_s, **options)
        if done.returncode != 0:
            raise TestbedError(f"{' '.join(command)} on {name}: status {done.returncode}: {done.stderr.strip()}")
        return str(done.stdout)

    # Faults

    def cut(self, name: str, *peers: str) -> None:
        """Lose every packet between a host and the peers, both ways, without any error: as in a wide-area network.

        A peer is a host or "notebook"; by default all that are up.
        """
        self._set_neighbours(name, peers, reachable=False)

    def heal(self, name: str, *peers: str) -> None:
        """Undo `cut`."""
        self._set_neighbours(name, peers, reachable=True)

    def shape(self, name: str, link: Link) -> None:
        """Change the delay, rate and loss of a host's cable for later frames."""
        relay = self._helper_pid(f"{self._netns_host(name).name}/relay")
        if relay is None:
            raise TestbedError(f"{name} has no relay: give `up` a link option, for example --delay 0ms")
        machine.write_at_once(self._path(name) / "link.json", link.to_json())
        os.kill(relay, signal.SIGHUP)

    def stop_sshd(self, name: str, *, sessions: bool = False) -> None:
        """Stop listening; with ``sessions`` close open connections too. Processes that they started may live on."""
        host = self.host(name)
        for pid in self._find_sshd(host, listening=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        machine.wait_until(lambda: not self._find_sshd(host, listening=True), f"the end of sshd on {name}")
        if sessions:
            self.kill_sessions(name)

    def start_sshd(self, name: str) -> None:
        """Start the SSH server; return once it listens."""
        host, log, config = self.host(name), self._path(name) / "sshd.log", self._path(name) / "sshd_config"
        try:
            machine.run(*self.enter(name), machine.find_tool("sshd") or "sshd", "-f", config, "-E", log)
            machine.wait_until(lambda: bool(self._find_sshd(host, listening=True)), f"sshd on {name}")
        except TestbedError as exc:
            raise TestbedError(f"{exc}\n{machine.read_end(log)}") from exc

    def kill_sessions(self, name: str) -> None:
        """Kill the processes that serve SSH connections, not the server; processes that they started may live on."""
        host = self.host(name)

        def find_sessions() -> set[int]:
            return self._find_sshd(host, listening=False) - self._find_sshd(host, listening=True)

        machine.kill_all(find_sessions, f"the end of the SSH sessions on {name}")

    def reboot(self, name: str) -> None:
        """Switch a host off and on. Home and /tmp stay, unless they are in memory (see ``disk``)."""
        self._switch_off(self._netns_host(name).name)
        self._boot(name)

    def set_own_name(self, name: str, own_name: OwnName) -> None:
        """Set the address to which a host's own name resolves, on that host only."""
        own = self._netns_host(name)
        lines = ["127.0.0.1\tlocalhost", f"{self.inventory.notebook_ip}\tnotebook"]
        for host in self.hosts:
            if host != own or own_name == "address":
                lines.append(f"{host.ip}\t{host.hostname} {host.name}")
            elif own_name == "127.0.1.1":
                lines.append(f"127.0.1.1\t{host.hostname} {host.name}")
        (self._path(name) / "hosts").write_text("\n".join(lines) + "\n")  # in place: it is mounted on /etc/hosts

    # Starting and stopping hosts

    def _plan_hosts(self, num_hosts: int, mode: Mode) -> tuple[Host, ...]:
        """Choose a network that is not in use, and the hosts' addresses in it."""
        inventories = self.folder.parent.glob("*/inventory.json")
        number = machine.choose_network({Inventory.from_json(path.read_text()).notebook_ip for path in inventories})
        network, port = (f"198.18.{number}", 22) if mode == "netns" else (f"127.{number}.0", 2222)
        return tuple(
            Host(
                name=f"h{i}",
                hostname=f"{self.prefix}-h{i}",
                ip=f"{network}.{10 + i}",
                port=port,
                user=pwd.getpwuid(os.getuid()).pw_name,
                mac=f"02:54:{number:02x}:00:00:{10 + i:02x}",
                identity_file=str(self.folder / "id"),
                known_hosts_file=str(self.folder / "known_hosts"),
            )
            for i in range(num_hosts)
        )

    def _begin(self, inventory: Inventory) -> None:
        """Create what the hosts share: inventory, keeper, bridge, key."""
        machine.write_at_once(self.folder / "inventory.json", inventory.to_json())
        if inventory.ttl_s or inventory.owner_pid:
            self._start_keeper(inventory.id)
        if inventory.mode == "netns":
            ip, bridge = inventory.notebook_ip, self._bridge
            add = f"link add name {bridge} address {inventory.notebook_mac} type bridge"
            machine.run("ip", "-batch", "-", stdin=f"{add}\naddr add {ip}/24 dev {bridge}\nlink set {bridge} up\n")
        elif os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd needs it; Debian creates it with its own service
        machine.make_key(self.folder / "id", comment=self.prefix)

    def _prepare(self, host: Host, sshd_options: Sequence[str]) -> None:
        """Create a host's folder: its keys, its sshd_config, and its lines in known_hosts and ssh_config."""
        folder = self._path(host.name)
        home = folder / "home"
        (home / ".ssh").mkdir(mode=0o700, parents=True)
        home.chmod(0o700)
        (folder / "tmp").mkdir()
        machine.make_key(folder / "hostkey", comment=host.hostname)
        shutil.copy(self.folder / "id.pub", home / ".ssh/authorized_keys")
        config = [*sshd_options, f"Port {host.port}", f"ListenAddress {host.ip}", f"HostKey {folder}/hostkey"]
        if self.inventory.mode == "loopback":
            config += ["StrictModes no", f"SetEnv HOME={home}", f"AuthorizedKeysFile {home}/.ssh/authorized_keys"]
        else:
            self.set_own_name(host.name, self.inventory.own_name)
        config += ["PidFile none", "UsePAM no", "UseDNS no", "PermitRootLogin prohibit-password"]
        config += ["PasswordAuthentication no", "KbdInteractiveAuthentication no", "Subsystem sftp internal-sftp"]
        if machine.does_sshd_punish():
            config += ["PerSourcePenalties no"]
        (folder / "sshd_config").write_text("\n".join(config) + "\n")
        with open(host.known_hosts_file, "a") as file:
            file.write(self.known_hosts(host.name))
        client = [f"Host {host.name}", f"HostName {host.ip}", f"Port {host.port}", f"User {host.user}"]
        client += [f"IdentityFile {host.identity_file}", "IdentitiesOnly yes"]
        client += [f"UserKnownHostsFile {host.known_hosts_file}", "StrictHostKeyChecking yes"]
        with open(self.folder / "ssh_config", "a") as file:
            file.write("\n  ".join(client) + "\n")

    def _boot(self, name: str) -> None:
        """Start a host's pid 1, connect its cable at both ends, start its sshd."""
        host, port, link = self.host(name), f"{self.prefix}-{name}", self.inventory.link
        unshare = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        self._start_helper(f"{name}/init", *unshare, *machine.python(_HOSTPROC, "init", self._path(name)))
        inside = str(self._pid_of_running(name))
        if link:
            machine.write_at_once(self._path(name) / "link.json", link.to_json())
            self._start_helper(f"{name}/relay", *machine.python(_HOSTPROC, "relay", self._path(name)))
            machine.run("ip", "link", "set", f"{port}x", "netns", inside, "name", "eth0")
        else:
            machine.run("ip", "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", inside)
        machine.plug_in(port, bridge=self._bridge)
        machine.run("ip", "link", "set", port, "up")
        batch = f"link set lo up\nlink set eth0 address {host.mac}\naddr add {host.ip}/24 dev eth0\nlink set eth0 up\n"
        machine.run(*self.enter(name, "--net"), "ip", "-batch", "-", stdin=batch)
        self.heal(name)  # fixed neighbours keep a cut silent: no ARP fails
        self.start_sshd(name)

    def _switch_off(self, name: str) -> None:
        self._end_helper(f"{name}/init")
        self._end_helper(f"{name}/relay")
        machine.delete_devices(rf"{self.prefix}-{name}x?")

    def _remove(self) -> None:
        self._end_helper("keeper")
        for path in sorted(self.folder.glob("h[0-9]*")):
            if self.inventory.mode == "netns":
                self._switch_off(path.name)
            else:
                self.stop_sshd(path.name, sessions=True)
                at_home = functools.partial(procfs.find_by_environment, f"HOME={path}/home")
                machine.kill_all(at_home, f"the end of what {path.name} ran")
        machine.delete_devices(rf"{self.prefix}-(br|h\d+x?)")
        if self.folder.exists():
            shutil.rmtree(self.folder)
        for helper in list(self._helpers):  # another process took the testbed down: reap our helpers
            self._end_helper(helper)

    def _set_neighbours(self, name: str, peers: Sequence[str], *, reachable: bool) -> None:
        self._netns_host(name)
        inventory = self.inventory
        nodes = {host.name: (host.ip, host.mac) for host in inventory.hosts}
        nodes["notebook"] = (inventory.notebook_ip, inventory.notebook_mac)
        for peer in peers:
            if peer not in nodes:
                raise TestbedError(f"no peer {peer!r} among {', '.join(nodes)}")
        peers = peers or [node for node in nodes if node != name and (node == "notebook" or self.pid(node))]
        for at, others in [(name, peers), *((peer, [name]) for peer in peers)]:
            start, device = ([], self._bridge) if at == "notebook" else (self.enter(at, "--net"), "eth0")
            batch = ""
            for ip, mac in (nodes[other] for other in others):
                batch += f"neigh replace {ip} lladdr {mac if reachable else _NOWHERE} dev {device} nud permanent\n"
            machine.run(*start, "ip", "-batch", "-", stdin=batch)

    # Processes: a helper is named by its pid file, "h0/init", "h0/relay" or "keeper"

    def _path(self, name: str) -> Path:
        return self.folder / self.host(name).name

    def _netns_host(self, name: str) -> Host:
        if self.inventory.mode != "netns":
            raise TestbedError("not possible in mode loopback")
        return self.host(name)

    def _pid_of_running(self, name: str) -> int:
        pid = self.pid(name)
        if pid is None:
            raise TestbedError(f"host {name} is down")
        return pid

    def _helper_pid(self, helper: str) -> int | None:
        try:
            then = procfs.read_stat(self.folder / f"{helper}.pid")
            now = procfs.read_stat(Path(f"/proc/{then.pid}/stat"))
        except (FileNotFoundError, ProcessLookupError):
            return None
        return now.pid if now.started == then.started and now.state not in "ZX" else None

    def _start_helper(self, helper: str, *command: str) -> None:
        """Start a helper; return when its pid file exists."""
        pid_file, log = self.folder / f"{helper}.pid", self.folder / f"{helper}.log"
        pid_file.unlink(missing_ok=True)
        process = self._helpers[helper] = machine.start(command, log=log)
        machine.wait_until(lambda: pid_file.exists() or process.poll() is not None, f"the start of {helper}")
        if process.poll() is not None:
            raise TestbedError(f"{helper} ended with status {process.returncode}:\n{machine.read_end(log)}")

    def _start_keeper(self, inventory_id: str) -> None:
        command = machine.python(Path(__file__).resolve(), "-p", self.prefix, "keep", inventory_id)
        process = self._helpers["keeper"] = machine.start(command, log=self.folder / "keeper.log")
        (self.folder / "keeper.pid").write_text(Path(f"/proc/{process.pid}/stat").read_text())

    def _end_helper(self, helper: str) -> None:
        """Kill a helper, if it runs, and wait for its exit: for a host's pid 1 that of all its processes."""
        pid = self._helper_pid(helper)
        if pid is not None and pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
            machine.wait_until(lambda: self._helper_pid(helper) is None, f"the end of {helper}")
        if process := self._helpers.pop(helper, None):
            process.kill()
            process.wait(_END_LIMIT_S)

    def _find_sshd(self, host: Host, *, listening: bool) -> set[int]:
        """Return the outer pids of the processes that hold the listening socket, or a connection to it."""
        inside = "self" if self.inventory.mode == "loopback" else self._pid_of_running(host.name)
        sockets = [tcp for tcp in procfs.read_tcp_sockets(inside) if (tcp.address, tcp.port) == (host.ip, host.port)]
        return procfs.find_holders({tcp.inode for tcp in sockets if tcp.is_listening == listening})


def _check_options(num_hosts: int, mode: Mode, link: Link | None, disk: str | None, own_name: OwnName) -> None:
    if reason := unavailable(mode, has_link=link is not None):
        raise TestbedError(reason)
    if not 1 <= num_hosts <= 200:
        raise TestbedError(f"{num_hosts} hosts: want 1 to 200")
    if own_name not in get_args(OwnName):
        raise TestbedError(f"own name {own_name!r}: want one of {', '.join(get_args(OwnName))}")
    if disk and not re.fullmatch(r"\d+[kmg]?", disk):
        raise TestbedError(f"disk {disk!r}: want a number and k, m or g")
    if mode == "loopback" and (link or disk or own_name != "address"):
        raise TestbedError("mode loopback has no link, no disk and no name of its own")


if __name__ == "__main__":
    from cli import main

    sys.exit(main(sys.argv[1:], description=__doc__))
