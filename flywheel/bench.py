"""`flywheel bench serving`: this platform beside vLLM's own server and Ray Serve LLM, in one run on one machine.

All three run the same model with the same engine arguments, all at once, and are driven in turn with the same
streaming load; the order of the three changes every turn, so that drift of the machine hits all alike.
Figures are medians over turns; what to trust are the ratios. Every server is stopped at the end.
"""

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from flywheel import processes
from flywheel.errors import BenchFailed
from flywheel.handle import Platform, free_ports
from flywheel.model import prepare_base_model
from flywheel.settings import Settings
from loadtest.raters import conversation, prompts_for_votes
from loadtest.stream_reader import Timing, read_stream, timing_of
from serving.engine import engine_arguments, engine_environment

OURS, VLLM, RAY_LLM = "flywheel", "vllm", "ray_serve_llm"
TURNS = {1: 8, 4: 1, 16: 1}  # streams at once → turns of each server in a round
NEW_TOKENS = 96
_START_LIMIT_S = 400.0
_STREAM_LIMIT_S = 300.0


@dataclass(frozen=True)
class Server:
    """A running server. model: the name to ask for."""

    name: str
    url: str
    model: str
    headers: Mapping[str, str]


def run(settings: Settings, *, rounds: int, peers: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    """Start the servers, drive them, stop them; returns the figures. Raises BenchFailed when one does not serve."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fwb")))
        prepare_base_model(settings, say)
        servers = []
        for name in (OURS, *peers):
            say(f"starting {name}")
            servers.append(stack.enter_context(_STARTERS[name](settings, folder)))
        return asyncio.run(_drive(servers, rounds, say))


@contextlib.contextmanager
def _platform(settings: Settings, folder: Path) -> Iterator[Server]:
    """This platform with capture on; its own home and ports, the serving settings of the caller."""
    given = settings.serving.model_dump(mode="json", exclude={"port", "host", "ray_address", "canary_tolerance"})
    assignments = [
        f"serving.{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in given.items()
    ]
    with Platform(folder / "home", *assignments, "rounds.controller.new_preferences=1000000000") as platform:
        platform.start()
        yield Server(OURS, platform.url, platform.settings.serving.alias, {"authorization": f"Bearer {platform.key}"})


@contextlib.contextmanager
def _vllm(settings: Settings, folder: Path) -> Iterator[Server]:
    [port] = free_ports(1)
    module = "vllm.entrypoints.openai.api_server"
    arguments = [*engine_arguments(settings.serving, "base"), "--host=127.0.0.1", f"--port={port}"]
    with peer_process([sys.executable, "-m", module, *arguments], settings, folder / "vllm.log") as process:
        server = Server(VLLM, f"http://127.0.0.1:{port}", "base", {})
        _wait(server, process, folder / "vllm.log")
        yield server


@contextlib.contextmanager
def _ray_llm(settings: Settings, folder: Path) -> Iterator[Server]:
    [port] = free_ports(1)
    arguments = [settings.serving.model_dump_json(), str(port)]
    log = folder / "ray_llm.log"
    with peer_process([sys.executable, "-m", "flywheel.bench_ray_llm", *arguments], settings, log) as process:
        server = Server(RAY_LLM, f"http://127.0.0.1:{port}", "base", {})
        _wait(server, process, log)
        yield server


_STARTERS: dict[str, Callable[[Settings, Path], contextlib.AbstractContextManager[Server]]] = {
    OURS: _platform,
    VLLM: _vllm,
    RAY_LLM: _ray_llm,
}
PEERS = (VLLM, RAY_LLM)


@contextlib.contextmanager
def peer_process(
    command: list[str], settings: Settings, log: Path, *, patience_s: float = 30
) -> Iterator["subprocess.Popen[bytes]"]:
    """A peer's process with the engine's environment; ended with everything below it, by force after patience_s."""
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}  # as our engine has
    environment = {**os.environ, **threads, **engine_environment(settings.serving), "TMPDIR": str(log.parent)}
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        tree = processes.tree(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        processes.kill_until_gone(lambda: tree)
        process.wait(10)


def _wait(server: Server, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchFailed(f"{server.name} does not serve:\n{log.read_text(errors='replace')[-3000:]}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/v1/models", timeout=5).status_code == 200:
                return
        time.sleep(0.5)


async def _drive(servers: list[Server], rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    measured: dict[tuple[str, int], list[_Turn]] = {(s.name, c): [] for s in servers for c in TURNS}
    timeout = aiohttp.ClientTimeout(total=_STREAM_LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        for server in servers:
            say(f"warming {server.name} up")
            await _turn(session, server, 4, 0)
        for number in range(rounds):
            for concurrency, turns in TURNS.items():
                for turn in range(turns):
                    first = (number + turn) % len(servers)
                    for server in servers[first:] + servers[:first]:
                        seed = 1 + number * turns + turn
                        done = await _turn(session, server, concurrency, seed)
                        measured[server.name, concurrency].append(done)
                        say(
                            f"round {number + 1} of {rounds}, {concurrency} at once, {server.name}: "
                            f"{done.tokens_per_s:.0f} tokens a second"
                        )
    return _report(servers, measured, rounds)


@dataclass(frozen=True)
class _Turn:
    tokens_per_s: float
    timings: list[Timing]


async def _turn(session: aiohttp.ClientSession, server: Server, concurrency: int, seed: int) -> _Turn:
    """`concurrency` streams at once; each seed asks other prompts, the same of every server."""
    prompts = prompts_for_votes()

    async def one(number: int) -> Timing:
        body = {
            "model": server.model,
            "messages": conversation("concise", prompts[(seed * 16 + number) % len(prompts)]),
            "max_tokens": NEW_TOKENS,
            "min_tokens": NEW_TOKENS,
            "temperature": 0.8,
            "seed": seed * 100 + number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        stream = await read_stream(session, f"{server.url}/v1/chat/completions", body, server.headers)
        try:
            return timing_of(stream)
        except ValueError as error:
            raise BenchFailed(f"{server.name}: {error}") from error

    began = time.perf_counter()
    timings = await asyncio.gather(*(one(number) for number in range(concurrency)))
    return _Turn(sum(timing.tokens for timing in timings) / (time.perf_counter() - began), list(timings))


def _report(servers: list[Server], measured: dict[tuple[str, int], list[_Turn]], rounds: int) -> dict[str, Any]:
    figures = {
        server.name: {str(count): _figures(measured[server.name, count]) for count in TURNS} for server in servers
    }
    report: dict[str, Any] = {"rounds": rounds, "new_tokens": NEW_TOKENS, "servers": figures}
    for peer in (name for name in figures if name != OURS):
        suffix = "" if peer == VLLM else f"_vs_{peer}"
        for count in TURNS:
            pairs = zip(measured[OURS, count], measured[peer, count], strict=True)
            ratio = statistics.median(ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs)
            report[f"ratio_tokens_per_s_{count}{suffix}"] = round(ratio, 3)
            added = figures[OURS][str(count)]["ttft_p50_ms"] - figures[peer][str(count)]["ttft_p50_ms"]
            report[f"ttft_added_p50_ms_{count}{suffix}"] = round(added, 1)
    return report


def _figures(turns: list[_Turn]) -> dict[str, float]:
    """The median over turns of tokens a second; percentiles over all streams of the rest."""
    first = [timing.time_to_first_token_s for one in turns for timing in one.timings]
    each = [timing.time_per_token_s for one in turns for timing in one.timings if timing.time_per_token_s is not None]
    return {
        "tokens_per_s": round(statistics.median(one.tokens_per_s for one in turns), 1),
        "ttft_p50_ms": round(1000 * _percentile(first, 0.5), 1),
        "ttft_p99_ms": round(1000 * _percentile(first, 0.99), 1),
        "time_per_token_p50_ms": round(1000 * _percentile(each, 0.5), 2),
        "time_per_token_p99_ms": round(1000 * _percentile(each, 0.99), 2),
    }


def _percentile(values: list[float], share: float) -> float:
    """By nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
