"""The versions of the packages that Brigade runs with here, so that other nodes get the same ones."""

from collections.abc import Callable, Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Find = Callable[[str], Distribution]


def pins(needs: Iterable[str], find: Find = distribution) -> str:
    """Constraints, a line each, for what these requirements come to, in the versions that are here.

    Left out is what no index has: a version with a local part, or what was installed from a folder or an address.
    """
    versions: dict[str, str] = {}
    waiting = list(filter(_is_meant_here, map(Requirement, needs)))
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            found = find(requirement.name)
        except PackageNotFoundError:
            continue
        if _is_from_an_index(found):
            versions[key[0]] = found.version
        waiting += [each for each in map(Requirement, found.requires or ()) if _is_meant_here(each, requirement.extras)]
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def _is_meant_here(requirement: Requirement, extras: Iterable[str] = ()) -> bool:
    """Whether it is needed on this machine, with these extras of whoever needs it."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def _is_from_an_index(found: Distribution) -> bool:
    return "+" not in found.version and found.read_text("direct_url.json") is None
