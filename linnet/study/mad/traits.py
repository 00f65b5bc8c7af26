"""Names of 0.1.0 for `linnet.study.mad.design`."""

from linnet.deprecation import renamed

__getattr__ = renamed(
    __name__,
    {"Traits": "linnet.study.mad.design.Design", "traits": "linnet.study.mad.design.named_design"},
)
