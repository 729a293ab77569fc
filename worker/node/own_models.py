"""Which models this node opens. What a peer calls a model is compared with what is here, never opened as a path."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from worker.config import Cluster
from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.headers import TensorInfo
from worker.model.repository import is_repository
from worker.node.loading import is_on_hub, open_checkpoint

Headers = Mapping[str, TensorInfo]
Opening = Callable[[], Checkpoint]

_SHOWN = 100  # characters of a name that a peer has given


@dataclass(frozen=True)
class OwnModels:
    """What the user of this node lets coordinators load, beside `demo` and what the hub's cache holds."""

    own: str | None = None  # a folder, a hub repository, or `demo`: whatever coordinators call it
    roots: tuple[Path, ...] = ()  # folders that hold folders of models
    may_download: bool = False  # any repository
    may_download_own: bool = True

    @classmethod
    def of(cls, cluster: Cluster, name: str | None, model: str | None) -> "OwnModels":
        """As this node's configuration says; `model` is its flag, which wins.

        What is meant for this node alone it may download. What is the model of all is downloaded once, by the
        coordinator that sends it, if that is how models are got.
        """
        entry = next((worker for worker in cluster.workers if worker.name == name), None)
        for_this_node = model or (entry.model if entry else None)
        is_sent = cluster.pull == "coordinator" and not for_this_node
        roots = tuple(map(Path, cluster.models))
        return cls(for_this_node or cluster.model, roots, cluster.pull == "hub", may_download_own=not is_sent)

    def open(self, wanted: str, known: Headers, check: Callable[[Checkpoint], None]) -> Checkpoint:
        """The first of this node's models that passes the check, of those that may be meant.

        Args:
            wanted: what the coordinator calls it.
            known: the headers of the coordinator's copy: with them a folder may lack files.
        Raises:
            ModelError: none may be meant, or else what the check said of the first.
        """
        refusals = []
        for opening in self.candidates(wanted, known):
            try:
                checkpoint = opening()
                check(checkpoint)
                return checkpoint
            except ModelError as error:
                refusals.append(error)
        raise refusals[0] if refusals else self._refusal(wanted)

    def candidates(self, wanted: str, known: Headers) -> list[Opening]:
        """What may be meant, the likeliest first. To open another repository than is asked for may take the network."""
        own = [partial(self._open_own, wanted, known)] if self.own else []
        named = [*_bundled(wanted), *self._below_roots(wanted, known), *self._from_hub(wanted, known)]
        is_far = is_on_hub(self.own or "") and not self._is_own_repository(wanted)
        return [*named, *own] if is_far else [*own, *named]

    def _open_own(self, wanted: str, known: Headers) -> Checkpoint:
        assert self.own is not None
        if is_on_hub(self.own) and not self.may_download_own:
            from worker.model.hub import open_cached

            return open_cached(wanted if self._is_own_repository(wanted) else self.own, known)
        if self._is_own_repository(wanted) and "@" not in self.own:
            from worker.model.hub import open_repository  # and with it huggingface_hub, which folders never need

            return open_repository(wanted)  # at the commit that the coordinator has
        return open_checkpoint(self.own, known)

    def _is_own_repository(self, wanted: str) -> bool:
        """Whether the own model comes from the same repository, at whatever revision."""
        own = self.own or ""
        return is_repository(wanted) and is_on_hub(own) and _repository(wanted) == _repository(own)

    def _below_roots(self, wanted: str, known: Headers) -> list[Opening]:
        name = PurePosixPath(_repository(wanted) if is_repository(wanted) else wanted).name
        return [
            partial(open_folder, found, known=known) for root in self.roots for found in _directly_below(root, name)
        ]

    def _from_hub(self, wanted: str, known: Headers) -> list[Opening]:
        if not is_repository(wanted) or self._is_own_repository(wanted):
            return []
        from worker.model.hub import open_cached, open_repository  # as above

        return [partial(open_repository, wanted) if self.may_download else partial(open_cached, wanted, known)]

    def _refusal(self, wanted: str) -> ModelError:
        """The same whether or not there is anything where the name points."""
        shown = repr(wanted if len(wanted) <= _SHOWN else f"{wanted[:_SHOWN]}...")
        has = "no folder of that name directly below its `models:`" if self.roots else "no model of its own"
        return ModelError(
            f"is asked for the model {shown}, opens no path that a peer names, and has {has}; "
            "start it with --model FOLDER_OR_REPO, or set `model:`, `models:` or `pull: coordinator` in its own "
            "cluster.yaml"
        )


def _repository(model: str) -> str:
    return model.partition("@")[0]


def _bundled(wanted: str) -> list[Opening]:
    return [partial(open_checkpoint, wanted)] if wanted == "demo" else []


def _directly_below(root: Path, name: str) -> Iterator[Path]:
    """The root's folder of this name, unless it is a link that leads out of the root."""
    try:
        for entry in root.iterdir():
            if entry.name == name and entry.resolve().is_relative_to(root.resolve()) and entry.is_dir():
                yield entry
    except (OSError, RuntimeError):  # it is not there, or a link leads back to itself
        return
