"""Names of 0.1.0 for `linnet.study.mad.expert_shares`."""

from linnet.deprecation import renamed

__getattr__ = renamed(
    __name__,
    {
        "expert_loads": "linnet.study.mad.expert_shares.expert_shares",
        "is_routed": "linnet.study.mad.expert_shares.is_routed",
        "Loads": "linnet.study.mad.expert_shares.Shares",
    },
)
