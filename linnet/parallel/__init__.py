"""One model on several devices. Without a process group (one device), nothing in here runs.

config.py   ParallelConfig, the `parallel` block of a training, and its checks
mesh.py     Mesh: the ranks of a run, their groups, and calls that all ranks make together
alive.py    ends a rank soon after another one has died
tensor.py   tensor parallelism: each rank holds a part of every layer
"""

from linnet.parallel.config import Degrees, ParallelConfig
from linnet.parallel.mesh import Mesh, PeerError, start, stop

__all__ = ["Degrees", "Mesh", "ParallelConfig", "PeerError", "start", "stop"]
