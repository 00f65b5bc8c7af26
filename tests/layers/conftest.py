"""What the tests of layers share: the forms of every mixer, in test_mixers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
