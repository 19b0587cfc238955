"""Stand-in of nvidia-cuda-mps-control: `mps_control.py KIND [-f]`, with the kinds of `mps.MpsHost`.

It behaves like versions 535 and 550: commands come over the socket `control`, the server is another process that
survives its daemon, and `quit` waits for it. Imports nothing of ours, because it is started for every command.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
SERVER_SECONDS = 0.2  # until a server is ready or has failed


def log(text: str) -> None:
    print(f"[at {time.monotonic()}] {text}", flush=True)


def serve(kind: str, pipes: Path) -> int:
    """Run the daemon."""
    if kind == "no daemon":
        print("An instance of this daemon is already running", flush=True)
        return 1
    servers: list[subprocess.Popen[bytes]] = []
    ready_at: dict[int, float] = {}  # servers that have not said so yet
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(pipes / "control"))
        listener.listen()
        listener.settimeout(SERVER_SECONDS)
        log(f"Starting control daemon {os.getpid()} with GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')}")
        while True:
            for server in servers[:]:
                if server.poll() is not None:
                    servers.remove(server)
                    log(f"Server {server.pid} exited with status {server.returncode}")
            for server in servers:
                if ready_at.get(server.pid, math.inf) < time.monotonic():
                    del ready_at[server.pid]
                    log(f"NEW SERVER {server.pid}: Ready")
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection:
                command = connection.recv(4096).decode().strip()
                if not command:
                    continue
                log(f"Cmd:{command}")
                if command.startswith("start_server"):
                    servers.append(subprocess.Popen([SERVER], start_new_session=True))
                    ready_at[servers[-1].pid] = time.monotonic() + SERVER_SECONDS
                    log(f"Starting new server {servers[-1].pid} for user {os.getuid()}")
                elif command == "get_server_list":
                    connection.sendall("".join(f"{server.pid}\n" for server in servers).encode())
                elif command.startswith("quit"):
                    for server in servers if kind != "stuck" else []:
                        server.terminate()
                    for server in servers:
                        server.wait()
                    log("Exit with status 0")
                    return 0
                else:
                    connection.sendall(f'Unknown command "{command}"\n'.encode())


def ask(pipes: Path) -> int:
    """Send the daemon the commands of standard input."""
    for line in sys.stdin:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(pipes / "control"))
            except OSError:
                print("Cannot find MPS control daemon process", flush=True)
                return 1
            connection.sendall(line.encode())
            while answer := connection.recv(4096):
                print(answer.decode(), end="", flush=True)
    return 0


if __name__ == "__main__":
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    sys.exit(serve(sys.argv[1], folder) if "-f" in sys.argv else ask(folder))
