"""The limit of open files, where mlx-lm may not set it."""

import resource

_ASKED = 4096  # by mlx-lm, for the hard limit, while it is imported


def allow_low_limit() -> None:
    """Have calls that ask for more open files than the hard limit set that limit: mlx-lm would fail to import."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    set_limit = resource.setrlimit

    def set_allowed(which: int, limits: tuple[int, int]) -> None:
        if which == resource.RLIMIT_NOFILE:
            soft, most = limits
            limits = min(soft, hard), min(most, hard)
        set_limit(which, limits)

    if hard != resource.RLIM_INFINITY and hard < _ASKED:
        resource.setrlimit = set_allowed
