"""Sends malformed requests to a live HTTP server: nothing may crash, hang, grow or be answered with the wrong status.

    python scripts/fuzz_http.py [--seconds 60] [--seed 0] [--case NUMBER]

Starts an echo pipeline and talks to its HTTP server over plain sockets: heads that end in the middle, bad chunks, wrong
lengths, requests in a row on one connection, bodies and forms changed byte by byte or value by value. Exits with 1 at
the first violation: /health is not answered in time, a status of 500 or more that is not documented, a traceback in a
log, memory or open files that grow. A violation names its case, which `--case` sends alone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import itertools
import json
import random
import re
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.fuzz_http_requests import CHAT, FILES, FORMS, REALTIME, VALID, chat
from tests.support.builders import chain, write
from tests.support.processes import processes_titled
from tests.support.servers import HttpPipeline
from tests.support.waiting import PATIENCE, until

HEALTH_SECONDS = 1.0 * PATIENCE
QUIET_SECONDS = 0.1  # without a byte, after which a connection has said what it had to say
CONNECTIONS = 4
WARM_UP = 0.3  # of the time, before memory is compared
GROWTH_BYTES = 48 << 20
SPARE_FILES = 8
ACCEPT_SECONDS = 2.0 * PATIENCE  # for a session to be accepted
# Statuses of answers, and ends of sessions, that no request may cause.
WRONG = {*range(500, 1000), 1011} - {503, 504}
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
ACCEPTED = b"HTTP/1.1 101 "
LOGGED = re.compile(r"(?:GET|POST|PUT|PATCH|DELETE|HEAD|OPTIONS) \S* (\d{3}) in ")

SMALL = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    10**400,
    0.5,
    -0.0,
    1e308,
    "",
    "x",
    "\0",
    "\ud800",
    "echo",
    [],
    {},
]
LARGE = ["x" * 100_000, "é" * 50_000, '"' * 50_000, "\\" * 50_000, [[]] * 3000, ["a"] * 3000, {"k" * 5000: 1}]
RAW = [
    b"NaN",
    b"1e999",
    b"-",
    b"1" * 100_000,
    b"0." + b"1" * 100_000,
    b"[" * 900 + b"]" * 900,
    b"[" * 20_001,
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b"[" + b"1," * 150_000 + b"1]",
    b"{" + b",".join(b'"k%d":1' % number for number in range(30_000)) + b"}",
    b'{"role":"user","role":"system","content":"","content":[]}',
]
MARK = "@RAW@"
BITS = [
    b"\r\n",
    b"\r",
    b"\n",
    b"\0",
    b'"',
    b"\\",
    b"{",
    b"[",
    b"]",
    b"}",
    b",",
    b":",
    b"\xff\xfe",
    b"\\ud800",
    b" " * 5000,
]
PATHS = [
    "/",
    "/health",
    "/metrics",
    "/openapi.json",
    "/v1/models",
    "/v1/models/%00",
    "/v1/status",
    "/v1/requests?limit=1e9",
    "/v1/requests?limit=5&limit=x",
    "/v1/requests/%ff%fe/timeline",
    "/v1/files/" + "a" * 5000,
    "//",
    "/../../etc/passwd",
    "http://evil.example/health",
    "*",
    "/v1/files/..%2f..%2f",
    "?",
    "/%",
]
METHODS = ["GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH", "TRACE", "CONNECT", "get", "FOO", ""]
HEADERS = [
    b"Host: evil.example",
    b"Host:",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity",
    b"Content-Length: 5",
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: 0x10",
    b"Content-Length: 5, 5",
    b"Content-Type: text/plain",
    b"Content-Type: multipart/form-data",
    b"Content-Encoding: gzip",
    b"Expect: 100-continue",
    b"Expect: 200-ok",
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13",
    b"Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    b"Origin: http://evil.example",
    b"traceparent: 00-" + b"f" * 32 + b"-" + b"0" * 16 + b"-01",
    b"Authorization: Bearer \xff\xfe",
    b"X: " + b"x" * 70_000,
    b"no colon",
    b" folded",
    b"N\0ul: a\0b",
    b": empty",
    b"Range: bytes=0-,1-,2-",
]
SIZES = [b"", b"-1", b"0x5", b"F" * 17, b"5;name=value", b"zz", b"0" * 5000 + b"5", b" 5 ", b"5\n", b"FFFFFFFFFFFFFFF0"]


class Case:
    """What one connection sends, repeatable by seed and number."""

    def __init__(self, seed: int, number: int) -> None:
        self.chance = random.Random(f"{seed}-{number}")
        self.name = f"case {number} of seed {seed}"
        requests = self.chance.choice((1, 1, 1, 1, 2, 3, 20))
        self.frames = b""  # sent once a session is accepted
        self.bytes = b"".join(self._request(last=index == requests - 1) for index in range(requests))

    def statuses(self, received: bytes) -> list[int]:
        """The statuses in what came back. Raises `ValueError` for what no server may send."""
        return [int(status) for status in STATUS.findall(received)]

    def _request(self, last: bool) -> bytes:
        what = self.chance.randrange(12)
        if what == 0:
            return self._head(self.chance.choice(METHODS), self.chance.choice(PATHS), last) + b"\r\n"
        if what == 1:
            made = self._head("GET", self.chance.choice(PATHS), last) + b"\r\n"
            return self.corrupt(made)
        if what == 2:
            return self.chance.randbytes(self.chance.choice((1, 100, 5000)))
        if what == 11 and last:
            return handshake() + self.chance.randbytes(self.chance.choice((0, 1, 100)))
        path, body, kind = self._form() if what in (3, 4) else self._json()
        return self._framed(path, body, kind, last)

    def _json(self) -> tuple[str, bytes, str]:
        path, valid = self.chance.choice(VALID)
        body = copy.deepcopy(valid)
        way = self.chance.randrange(8)
        for _ in range(self.chance.choice((1, 1, 2, 5)) if way < 5 else 0):
            self.change(body)
        data = json.dumps(body).encode()
        data = data.replace(b'"%s"' % MARK.encode(), self.chance.choice(RAW))
        if way in (5, 6):
            data = self.corrupt(data)
        return path, data, "application/json"

    def change(self, body: dict[str, Any]) -> None:
        """Change one value of the body, at any depth."""
        if not (found := list(spots(body))):
            return  # an earlier change has taken its last member
        container, key = self.chance.choice(found)
        what = self.chance.randrange(7)
        if what == 0:
            del container[key]
        elif what == 1 and isinstance(container, dict):
            container[self.chance.choice(("modle", "data", "url", "", "\0", "\ud800", "x" * 3000))] = container.pop(key)
        elif what == 2:
            container[key] = self.chance.choice(
                ([container[key]], {"a": container[key]}, [copy.deepcopy(container[key])] * 2)
            )
        elif what == 3:
            container[key] = MARK
        elif what == 4:
            container[key] = copy.deepcopy(self.chance.choice(LARGE))
        else:
            container[key] = copy.deepcopy(self.chance.choice(SMALL))

    def _form(self) -> tuple[str, bytes, str]:
        path, fields, files = self.chance.choice(FORMS)
        parts = [(f'name="{name}"', value.encode()) for name, value in fields.items()]
        parts += [(f'name="{name}"; filename="a"', data) for name, data in files.items()]
        if path == FILES:
            parts += [('name="a"', b"x" * 2000)] * self.chance.choice((0, 0, 3, 1200))
        for _ in range(self.chance.choice((0, 0, 1, 1, 3))):
            index = self.chance.randrange(len(parts))
            value = str(self.chance.choice(self.chance.choice((SMALL, LARGE)))).encode(errors="replace")
            what = self.chance.randrange(4)
            if what == 0 and len(parts) > 1:
                del parts[index]
            elif what == 1:
                parts.append(parts[index])
            else:
                parts[index] = (parts[index][0], value)
        self.chance.shuffle(parts)
        head = "--B\r\nContent-Disposition: form-data; {}\r\n\r\n"
        data = b"".join(head.format(name).encode() + value + b"\r\n" for name, value in parts) + b"--B--\r\n"
        return path, data if self.chance.random() < 0.7 else self.corrupt(data), "multipart/form-data; boundary=B"

    def _framed(self, path: str, body: bytes, kind: str, last: bool) -> bytes:
        head = self._head("POST", path, last) + f"Content-Type: {kind}\r\n".encode()
        way = self.chance.randrange(6)
        if way == 0:
            return head + b"Transfer-Encoding: chunked\r\n\r\n" + self._chunks(body)
        if way == 1:
            wrong = max(0, len(body) + self.chance.choice((-100, -1, 1, 100)))
            return head + b"Content-Length: %d\r\n\r\n" % wrong + body
        if way == 2:
            return self.corrupt(head + b"Content-Length: %d\r\n\r\n" % len(body)) + body
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def _head(self, method: str, path: str, last: bool) -> bytes:
        version = (
            "HTTP/1.1" if self.chance.random() < 0.95 else self.chance.choice(("HTTP/1.0", "HTTP/2.0", "HTTP", ""))
        )
        lines = [f"{method} {path} {version}".encode(), b"Host: localhost"]
        if self.chance.random() < 0.2:
            lines.append(self.chance.choice(HEADERS))
        if last:
            lines.append(b"Connection: close")
        return b"\r\n".join(lines) + b"\r\n"

    def _chunks(self, body: bytes) -> bytes:
        cut = sorted(self.chance.sample(range(len(body) + 1), min(len(body), self.chance.choice((0, 1, 5)))))
        pieces = [body[start:end] for start, end in itertools.pairwise([0, *cut, len(body)]) if end > start]
        made = [b"%x\r\n" % len(piece) + piece + b"\r\n" for piece in pieces]
        made.append(
            self.chance.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nA: b\r\n\r\n", b"0\r\n" + b"A: b\r\n" * 20_000, b""))
        )
        if self.chance.random() < 0.5:
            index = self.chance.randrange(len(made))
            made[index] = self.chance.choice(
                (self.chance.choice(SIZES) + b"\r\n" + made[index], made[index][:-2], b"\r\n")
            )
        return b"".join(made)

    def corrupt(self, data: bytes) -> bytes:
        """Flip, cut, repeat or insert bytes."""
        changed = bytearray(data)
        for _ in range(self.chance.choice((1, 1, 2, 8))):
            start = self.chance.randrange(len(changed) + 1)
            end = min(len(changed), start + self.chance.choice((0, 1, 4, 100)))
            what = self.chance.randrange(5)
            if what == 0:
                changed[start:end] = self.chance.randbytes(end - start)
            elif what == 1:
                del changed[start:end]
            elif what == 2:
                changed[start:start] = changed[start:end] * self.chance.choice((1, 50))
            elif what == 3:
                changed[start:start] = self.chance.choice(BITS)
            else:
                del changed[start:]
        return bytes(changed)


def handshake(path: str = REALTIME) -> bytes:
    """The request for a session."""
    return (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
    ).encode()


def spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every member and item inside a value, as its container and its key or index."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from spots(value[key])


class Fuzzer:
    """Sends cases of a kind from several threads until the time is over or something is wrong."""

    def __init__(self, pipeline: HttpPipeline, seed: int, kind: type[Case] = Case) -> None:
        self._kind = kind
        host, port = pipeline.url.removeprefix("http://").split(":")
        self._address = (host, int(port))
        self._pipeline = pipeline
        self._seed = seed
        self._numbers = itertools.count()
        (server,) = processes_titled("omni:http", pipeline.process.pid)
        self._server = psutil.Process(server)
        self._files = self._server.num_fds()
        self._logged = {path: path.stat().st_size for path in self._logs()}
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.violations: list[str] = []
        self.statuses: collections.Counter[int] = collections.Counter()
        self.cases = 0
        self.slowest_health = 0.0

    def run(self, seconds: float) -> None:
        """Raise `AssertionError` for the first violation."""
        threads = [threading.Thread(target=self._send_cases) for _ in range(CONNECTIONS)]
        threads.append(threading.Thread(target=self._watch_health))
        for thread in threads:
            thread.start()
        self._over.wait(seconds * WARM_UP)
        before = self._server.memory_info().rss
        self._over.wait(seconds * (1 - WARM_UP))
        self._over.set()
        for thread in threads:
            thread.join()
        self._check_the_end(before)

    def send(self, case: Case) -> None:
        """Send one case and look at what comes back."""
        received = b""
        with contextlib.suppress(OSError), socket.create_connection(self._address, 5) as made:
            cut = case.chance.randrange(len(case.bytes) + 1)
            made.sendall(case.bytes[:cut])
            made.sendall(case.bytes[cut:])
            if case.frames:
                made.settimeout(ACCEPT_SECONDS)
                while ACCEPTED not in received and (piece := made.recv(1 << 16)):
                    received += piece
                made.sendall(case.frames)
            way = case.chance.randrange(12)
            if way == 0:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return  # closes with a reset
            if way == 1:
                made.shutdown(socket.SHUT_WR)
            made.settimeout(QUIET_SECONDS)
            while piece := made.recv(1 << 16):
                received += piece
        statuses = case.statuses(received)
        with self._lock:
            self.cases += 1
            self.statuses.update(statuses)
        if WRONG.intersection(statuses):
            self._violation(f"{case.name} was answered with {received[:2000]!r}")

    def _send_cases(self) -> None:
        while not self._over.is_set():
            number = next(self._numbers)
            try:
                self.send(self._kind(self._seed, number))
            except Exception as error:  # noqa: BLE001  # a thread has no caller to raise it to
                self._violation(f"case {number} of seed {self._seed}: {error!r}")

    def _watch_health(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            try:
                response = httpx.get(f"{self._pipeline.url}/health", timeout=HEALTH_SECONDS)
            except httpx.HTTPError as error:
                self._violation(f"/health: {error!r} after {time.monotonic() - began:.1f} s")
                return
            self.slowest_health = max(self.slowest_health, time.monotonic() - began)
            if response.status_code != 200:
                self._violation(f"/health: {response.status_code} {response.text}")
            self._over.wait(0.05)

    def _violation(self, what: str) -> None:
        with self._lock:
            self.violations.append(what)
        self._over.set()

    def _logs(self) -> list[Path]:
        return list((self._pipeline.run_dir / "logs").iterdir())

    def check_the_logs(self) -> None:
        """Raise `AssertionError` for a traceback or an undocumented status that was logged since the beginning."""
        for path in self._logs():
            log = path.read_bytes()[self._logged.get(path, 0) :].decode(errors="replace")
            found = re.search(r"Traceback|a request failed|session failed|Task exception|ERROR http uvicorn", log)
            assert not found, f"{path.name}: {log[found.start() - 500 : found.start() + 12_000]}"
            wrong = WRONG.intersection(map(int, LOGGED.findall(log)))
            assert not wrong, f"{path.name} has requests that were answered with {wrong}"

    def _check_the_end(self, before: int) -> None:
        assert not self.violations, self.violations[0]
        self.check_the_logs()
        answer = httpx.post(f"{self._pipeline.url}{CHAT}", json=chat("still here", max_tokens=20)[1], timeout=30)
        assert answer.json()["choices"][0]["message"]["content"].endswith("still here"), answer.text
        self._pipeline.assert_idle()
        most = self._files + SPARE_FILES
        until(lambda: self._server.num_fds() <= most, 5, lambda: f"{self._server.num_fds()} open files to be {most}")
        after = self._server.memory_info().rss
        assert after < before + GROWTH_BYTES, f"RSS grew from {before >> 20} to {after >> 20} MiB"
        self.memory = (before, after)


def main(kind: type[Case], description: str | None) -> None:
    """Run the command line of a fuzzer that sends cases of this kind."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    options = parser.parse_args()
    data = chain()
    for name, modality in (("dit", "image"), ("film", "video")):
        data["stages"].append({"name": name, "kind": "echo", "inputs": {"from": "prompt"}, "outputs": [modality]})
    with tempfile.TemporaryDirectory() as folder, HttpPipeline(write(Path(folder), data)) as pipeline:
        fuzzer = Fuzzer(pipeline, options.seed, kind)
        if options.case is not None:
            case = kind(options.seed, options.case)
            print(case.bytes[:5000], case.frames[:5000])
            fuzzer.send(case)
            print(dict(fuzzer.statuses), fuzzer.violations, pipeline.log()[-3000:])
            return
        try:
            fuzzer.run(options.seconds)
        except AssertionError as error:
            raise SystemExit(f"violation: {error}") from error
    before, after = (size / 2**20 for size in fuzzer.memory)
    print(f"{fuzzer.cases} connections in {options.seconds:g} s; statuses {dict(sorted(fuzzer.statuses.items()))}")
    print(f"slowest /health {fuzzer.slowest_health:.2f} s; RSS of the server {before:.1f} -> {after:.1f} MiB")


if __name__ == "__main__":
    main(Case, __doc__)
