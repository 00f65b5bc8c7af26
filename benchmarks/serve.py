"""Many streams at once against `linnet serve`: errors, starvation, and memory that must not grow.

    python benchmarks/serve.py                          tnl-10m with random weights (speed does not depend on them)
    python benchmarks/serve.py RUN --streams 64 --seconds 120 --slots 64
    python benchmarks/serve.py RUN --slots 16           more streams than slots: the others wait for their turn
    python benchmarks/serve.py --recipe tnl-3b --devices 2 --streams 32 --slots 16

Starts the server in a process of its own. A request of each stream comes first and does not count: kernels compile.
Each stream asks for `--tokens` tokens, reads them as they come, and asks
again until the time is up; prompts differ in length and settings in what they draw. Then it prints for streams (tokens,
slowest against fastest), requests (time to the first token, longest silence) and the server's memory: resident bytes
behind a warm-up and at the end, and the slope in between. The last line is JSON; the exit code is 1 where something
failed, a stream starved (had less than half of the mean), or memory grew by more than `--growth` MB.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

WARM_UP = 15.0  # s: every stream has begun, and the allocator has seen every size


@dataclass
class Stream:
    """What one client saw."""

    tokens: float = 0
    requests: int = 0
    first: list[float] = field(default_factory=list)  # s to the first token of a request
    silence: float = 0.0  # s, the longest between two events
    errors: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="a run or model folder; default: a recipe with random weights")
    parser.add_argument("--recipe", default="tnl-10m")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--tokens", type=int, default=256, help="of a request")
    parser.add_argument("--growth", type=float, default=16, help="MB that the server's memory may grow by")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--devices", type=int, default=1, help="each with its own slots")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or save_random(options.recipe, Path(folder) / options.recipe)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["serve", str(run), "--port", str(port), "--slots", str(options.slots), "--device", options.device]
        command += ["--devices", str(options.devices)]
        server = subprocess.Popen([sys.executable, "-P", "-m", "linnet", *command, "--name", "model"])
        try:
            wait_until_up(server, port)
            result = asyncio.run(drive(options, server, port))
            server.terminate()
            result["exit_code"] = server.wait(60)
        finally:
            server.kill()
    print(json.dumps({"run": options.run or options.recipe, **vars(options), **result} | {"recipe": None}))
    sys.exit(not result["ok"])


def save_random(recipe: str, path: Path) -> Path:
    from linnet.data import ByteTokenizer
    from linnet.models import build_model, get_recipe
    from linnet.runs.model import save_model

    config = get_recipe(recipe)
    return save_model(path, config, build_model(config).state_dict(), ByteTokenizer())


def wait_until_up(server: subprocess.Popen, port: int) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


async def drive(options: argparse.Namespace, server: subprocess.Popen, port: int) -> dict:
    await asyncio.gather(*(read(Stream(), i, port, options.tokens, most=1) for i in range(options.streams)))
    started = time.monotonic()
    end = started + options.seconds
    streams = [Stream() for _ in range(options.streams)]
    memory: list[tuple[float, float]] = []  # s, MB

    async def sample() -> None:
        while time.monotonic() < end:
            memory.append((time.monotonic() - started, resident(server.pid)))
            await asyncio.sleep(1)

    await asyncio.gather(sample(), *(read(stream, i, port, options.tokens, end) for i, stream in enumerate(streams)))
    settled = [row for row in memory if row[0] > min(WARM_UP, options.seconds / 2)]
    growth = settled[-1][1] - settled[0][1]
    slope = statistics.linear_regression(*zip(*settled, strict=True)).slope if len(settled) > 1 else 0.0
    tokens = sorted(stream.tokens for stream in streams)
    first = sorted(x for stream in streams for x in stream.first)
    errors = [error for stream in streams for error in stream.errors]
    fair = tokens[0] >= statistics.mean(tokens) / 2
    result = {
        "tokens_per_s": round(sum(tokens) / options.seconds, 1),
        "requests": sum(stream.requests for stream in streams),
        "errors": len(errors),
        "tokens_slowest": round(tokens[0]),
        "tokens_mean": round(statistics.mean(tokens)),
        "tokens_fastest": round(tokens[-1]),
        "first_token_median_s": round(statistics.median(first), 3) if first else None,
        "first_token_longest_s": round(first[-1], 3) if first else None,
        "longest_silence_s": round(max(stream.silence for stream in streams), 3),
        "rss_before_mb": round(settled[0][1], 1),
        "rss_after_mb": round(settled[-1][1], 1),
        "rss_slope_mb_per_min": round(slope * 60, 2),
        "load": [round(x, 1) for x in os.getloadavg()],
        "ok": not errors and fair and growth <= options.growth,
    }
    for key, value in result.items():
        print(f"{key:<24}{value}")
    for error in errors[:5]:
        print(f"error: {error}")
    return result


async def read(
    stream: Stream, number: int, port: int, tokens: int, end: float = float("inf"), most: float = float("inf")
) -> None:
    """One client: a request after another until the time is up, the last one to its end, and at most so many."""
    generator = random.Random(number)
    while time.monotonic() < end and stream.requests + len(stream.errors) < most:
        body = {
            "model": "model",
            "prompt": "x" * generator.randint(1, 400),
            "max_tokens": tokens,
            "temperature": generator.choice([0, 0.7, 1.0]),
            "top_p": generator.choice([1.0, 0.9]),
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        try:
            stream.tokens += await ask(stream, port, json.dumps(body).encode(), tokens, end)
            stream.requests += 1
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            stream.errors.append(f"stream {number}: {error!r}")
            await asyncio.sleep(1)


async def ask(stream: Stream, port: int, body: bytes, expected: int, end: float) -> float:
    """One request. Plain HTTP by hand: a client library would take more of the machine than the server does.

    Returns its tokens until `end`: of the last ones of each stream the share of their events.
    """
    began = last = time.monotonic()
    first, events, late = True, 0, 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(f"{status!r} {(await reader.read())[-300:]!r}")
        found, previous, done = None, b"", False
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            now = time.monotonic()
            events, late = events + 1, late + (now > end)
            if first:
                stream.first.append(now - began)
                first = False
            else:
                stream.silence = max(stream.silence, now - last)
            last = now
            if b'"error"' in line:
                raise ValueError(line.decode())
            if done := line.startswith(b"data: [DONE]"):
                found = json.loads(previous[6:])["usage"]["completion_tokens"]
                break
            previous = line
    finally:
        writer.close()
    if not done or found != expected:
        raise ValueError(f"{found} tokens instead of {expected}")
    return found * (1 - late / events)


def resident(process: int) -> float:
    """Resident memory of a process in MB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
