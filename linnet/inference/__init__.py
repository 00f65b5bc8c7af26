"""Generation in constant memory: an engine with state slots, its requests and its worker thread.

engine = Engine.of_run("runs/tnl-10m-0123456789ab")
for piece in engine.stream("def main(", Sampling(max_tokens=200, temperature=0.8, seed=1)):
    print(piece.text, end="")
"""

from linnet.inference.engine import Counters, Engine
from linnet.inference.prefix import Prefix
from linnet.inference.request import Completion, Piece, Request
from linnet.inference.sampling import MOST_LOGPROBS, Sampling
from linnet.inference.workers import EngineProcess, Worker, Workers

__all__ = [
    "MOST_LOGPROBS",
    "Completion",
    "Counters",
    "Engine",
    "EngineProcess",
    "Piece",
    "Prefix",
    "Request",
    "Sampling",
    "Worker",
    "Workers",
]
