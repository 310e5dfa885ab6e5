"""The command line of testbed.py, which is also its documentation there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from inventory import Link, Mode, OwnName, parse_link
from testbed import Testbed, TestbedError


def main(argv: Sequence[str], *, description: str) -> int:
    """Do what the arguments say; return the status of the program."""
    arguments = _parse(argv, description)
    try:
        return _obey(Testbed(arguments.prefix), arguments)
    except (TestbedError, ValueError) as exc:
        print(f"testbed: {str(exc).removeprefix('testbed: ')}", file=sys.stderr)
        return 2


def _parse(argv: Sequence[str], description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("-p", "--prefix", default="tb", help="the testbed's name: a letter, then letters and digits")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    link = argparse.ArgumentParser(add_help=False)
    for option in ("--delay", "--rate", "--loss"):
        link.add_argument(option)

    up = commands.add_parser("up", parents=[link])
    up.add_argument("num_hosts", type=int, metavar="N")
    up.add_argument("--mode", choices=get_args(Mode), default="netns")
    up.add_argument("--share", action="append", default=[], help="a folder below the home or /tmp that hosts see too")
    up.add_argument("--disk", metavar="64m", help="size of the home and of the /tmp, which are then in memory")
    up.add_argument("--ttl", type=float, default=0.0, metavar="SECONDS", help="go down by itself after that time")
    up.add_argument("--own-name", choices=get_args(OwnName), default="address", help="what a host's own name is to it")
    up.add_argument("--sshd-option", action="append", default=[], metavar="LINE", help="a line of sshd_config")
    for name in ("list", "down"):
        commands.add_parser(name)
    commands.add_parser("keep").add_argument("id")

    on_a_host = ["cut", "exec", "heal", "kill-sessions", "listening", "processes", "reboot", "start-sshd", "stop-sshd"]
    for name in on_a_host:
        commands.add_parser(name).add_argument("host")
    commands.add_parser("shape", parents=[link]).add_argument("host")
    commands.choices["exec"].add_argument("argv", nargs=argparse.REMAINDER)
    for name in ("cut", "heal"):
        commands.choices[name].add_argument("peers", nargs="*")
    commands.choices["stop-sshd"].add_argument("--sessions", action="store_true")
    return parser.parse_args(argv)


def _obey(testbed: Testbed, arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "up":
            inventory = testbed.up(
                arguments.num_hosts,
                mode=arguments.mode,
                link=parse_link(arguments.delay, arguments.rate, arguments.loss),
                share=arguments.share,
                disk=arguments.disk,
                ttl_s=arguments.ttl,
                own_name=arguments.own_name,
                sshd_options=arguments.sshd_option,
            )
            print(inventory.to_json())
        case "list":
            print(testbed.inventory.to_json())
        case "down":
            testbed.down()
        case "keep":
            testbed.keep(arguments.id)
        case _:
            return _obey_on_a_host(testbed, arguments.host, arguments)
    return 0


def _obey_on_a_host(testbed: Testbed, host: str, arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "cut":
            testbed.cut(host, *arguments.peers)
        case "exec":
            return testbed.exec(host, *arguments.argv, timeout_s=None).returncode
        case "heal":
            testbed.heal(host, *arguments.peers)
        case "kill-sessions":
            testbed.kill_sessions(host)
        case "listening":
            for address, port in testbed.listening(host):
                print(address, port)
        case "processes":
            for pid, argv in testbed.processes(host).items():
                print(pid, *argv)
        case "reboot":
            testbed.reboot(host)
        case "shape":
            testbed.shape(host, parse_link(arguments.delay, arguments.rate, arguments.loss) or Link())
        case "start-sshd":
            testbed.start_sshd(host)
        case "stop-sshd":
            testbed.stop_sshd(host, sessions=arguments.sessions)
    return 0
