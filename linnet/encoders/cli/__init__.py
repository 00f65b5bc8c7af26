"""Commands on masked language models, GLUE and the Long Range Arena."""

import linnet.cli  # noqa: F401  (first, since it imports the commands of this folder, which use its own)
