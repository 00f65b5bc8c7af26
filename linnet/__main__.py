import os
import sys

# `python -m` looks for modules in the current folder first. Without it, files there with names such as yaml.py are not
# imported; `python -P -m linnet` keeps a file linnet.py out too.
if sys.path[:1] == [os.getcwd()] != [os.path.dirname(os.path.dirname(__file__))] and not sys.flags.safe_path:
    del sys.path[0]

from linnet.cli import main

main()
