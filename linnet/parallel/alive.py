"""Ends a rank soon after another one has died.

A rank that waits in NCCL for a dead one waits until a timeout, and the signals of the launcher cannot reach it there.
So every rank keeps a connection to rank 0, which the system closes when a process dies, however it dies. Then rank 0
tells the others, and each process ends, unless it has ended by itself within `GRACE` seconds with an error of its own.
"""

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

GRACE = 3.0  # seconds to end with an error of its own, which says more
LOOK = 0.02  # seconds between two looks into the store
CONNECT = 5.0  # seconds for a connection; without one, a rank waits for timeouts as torch does
_LEAVING, _LOST = b"l", b"x"

_sockets: list[socket.socket] = []
_leaving = threading.Event()


def came(store: dist.Store, key: str, seconds: float) -> bool:
    """Waits until a rank has set the key, and returns whether it did. A signal acts at once, unlike in `store.wait`."""
    end = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(LOOK)
    return True


def watch(store: dist.Store, attempt: str, rank: int, world: int, seconds: float) -> None:
    """Connects this rank to rank 0 and watches the connection in a thread. Never fails: at worst nothing is watched.

    Args:
        store: of this attempt; tells where rank 0 listens.
        attempt: its name, by which rank 0 knows the other ranks from strangers who try its port.
        seconds: how long the other ranks wait for rank 0.
    """
    _leaving.clear()
    if rank == 0:
        addresses = ""
        with contextlib.suppress(OSError):
            server = socket.create_server(("", 0), backlog=world)
            _sockets.append(server)
            addresses = " ".join(f"{name}:{server.getsockname()[1]}" for name in _own_names())
            _start(lambda: _watch_all(server, attempt.encode()))
        store.set("alive", addresses)
        return
    with contextlib.suppress(OSError, RuntimeError):
        peer = _connected(store.get("alive").decode().split()) if came(store, "alive", seconds) else None
        if peer is not None:
            _sockets.append(peer)
            peer.sendall(attempt.encode() + rank.to_bytes(4, "big"))
            _start(lambda: _watch_main(peer))


def leave() -> None:
    """Tells the others that this rank ends as it should."""
    _leaving.set()
    for peer in _sockets:
        with contextlib.suppress(OSError):
            peer.sendall(_LEAVING)
    for peer in _sockets:
        with contextlib.suppress(OSError):
            peer.close()
    _sockets.clear()


def _start(do: Callable[[], None]) -> None:
    threading.Thread(target=do, name="linnet-alive", daemon=True).start()


def _own_names() -> list[str]:
    """Returns names under which other ranks may reach this machine; the first that answers is used."""
    names = [] if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) != int(os.environ["WORLD_SIZE"]) else ["127.0.0.1"]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing; chooses the interface
        names.append(probe.getsockname()[0])
    return [*names, socket.gethostname()]


def _connected(addresses: list[str]) -> socket.socket | None:
    for address in addresses:
        name, _, port = address.rpartition(":")
        with contextlib.suppress(OSError):
            peer = socket.create_connection((name, int(port)), timeout=CONNECT)
            peer.settimeout(None)
            return peer
    return None


def _watch_main(peer: socket.socket) -> None:
    """Waits on a rank other than 0 for rank 0's word, or its death."""
    told = b""
    with contextlib.suppress(OSError):
        told = peer.recv(1)
    if told != _LEAVING:
        _end("rank 0 was lost" if not told else "a rank was lost")


def _rank_of(peer: socket.socket, attempt: bytes) -> int | None:
    """Returns the rank at the other end of a new connection, None if it is not one of this attempt."""
    told = b""
    peer.settimeout(CONNECT)
    with contextlib.suppress(OSError):
        while len(told) < len(attempt) + 4 and (more := peer.recv(len(attempt) + 4 - len(told))):
            told += more
    peer.settimeout(None)
    return int.from_bytes(told[len(attempt) :], "big") if told.startswith(attempt) and told != attempt else None


def _watch_all(server: socket.socket, attempt: bytes) -> None:
    """Waits on rank 0 for the death of any other rank, and tells the rest."""
    ranks: dict[socket.socket, int] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(server, selectors.EVENT_READ)
        while not _leaving.is_set():
            for key, _ in ready.select(timeout=1.0):
                if key.fileobj is server:
                    with contextlib.suppress(OSError):
                        peer, _ = server.accept()
                        if (number := _rank_of(peer, attempt)) is None:
                            peer.close()
                            continue
                        ranks[peer] = number
                        _sockets.append(peer)
                        ready.register(peer, selectors.EVENT_READ)
                    continue
                peer, told = key.fileobj, b""
                with contextlib.suppress(OSError):
                    told = peer.recv(1)
                ready.unregister(peer)
                if told == _LEAVING or _leaving.is_set():
                    continue
                for other in ranks:
                    with contextlib.suppress(OSError):
                        other.sendall(_LOST)
                return _end(f"rank {ranks[peer]} was lost")


def _end(reason: str) -> None:
    time.sleep(GRACE)
    if not _leaving.is_set():
        print(f"{reason}; rank {os.environ.get('RANK', '?')} ends", file=sys.stderr, flush=True)
        os._exit(1)
