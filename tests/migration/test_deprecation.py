"""Old names are served with one warning that gives the new name."""

import pytest

from linnet.deprecation import LinnetDeprecationWarning, renamed


def test_an_old_name_is_served_with_a_warning_that_gives_the_new_one():
    get = renamed("linnet.old", {"ceil": "math.ceil"})
    with pytest.warns(LinnetDeprecationWarning, match=r"linnet\.old\.ceil.*math\.ceil") as caught:
        assert get("ceil")(1.5) == 2
    assert caught[0].filename == __file__


def test_an_unknown_name_stays_an_attribute_error():
    with pytest.raises(AttributeError, match="floor"):
        renamed("linnet.old", {})("floor")
