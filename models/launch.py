"""The main job as several processes of this machine: `python -m models.launch 2 --steps 50`, options as for
`models.train`.

Each process has its share of eight virtual devices. When one fails or is killed the others end too, by
themselves.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from models.devices import FLAG
from models.options import stop


def main(argv: Sequence[str]) -> None:
    if not argv or not argv[0].isdecimal() or int(argv[0]) < 1:
        stop("say first how many processes: python -m models.launch 2 --steps 50")
    processes = start(int(argv[0]), argv[1:])
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        failed = ", ".join(f"process {i} with {code}" for i, code in enumerate(codes) if code)
        raise SystemExit(f"launch: failed: {failed}")


def start(count: int, argv: Sequence[str], **options: Any) -> list[subprocess.Popen]:
    """`count` processes of the job on this machine. `options` are those of `subprocess.Popen`."""
    command = [sys.executable, "-m", "models.train", *argv]
    if count > 1:
        command += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(count)]
    return [
        subprocess.Popen([*command, "--process", str(i)], env=environment(), **options) for i in range(count)
    ]


def environment(devices: int | None = None) -> Mapping[str, str]:
    """This one's, without its number of virtual devices: with `devices`, or what the job then asks for."""
    flags = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(FLAG))
    return {**os.environ, "XLA_FLAGS": f"{flags} {FLAG}={devices}" if devices else flags}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    main(sys.argv[1:])
