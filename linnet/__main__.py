import os
import sys

# `python -m` looks for modules in the current folder first. Without it, files there with names such as yaml.py are not
# imported; `python -P -m linnet` keeps a file linnet.py out too.
if sys.path[:1] == [os.getcwd()] != [os.path.dirname(os.path.dirname(__file__))] and not sys.flags.safe_path:
    del sys.path[0]


def main() -> None:
    """Runs the command line. Ctrl-C while its modules are imported ends the process at once, without a traceback."""
    import signal  # not above: from the current folder, as long as that is first

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from linnet.cli import main

    main()


if __name__ == "__main__":
    main()
