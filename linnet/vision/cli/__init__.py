"""Commands on images."""

import linnet.cli  # noqa: F401  (first, since it imports the commands of this folder, which use its own)
