"""Models on the Hugging Face hub: small files and headers first, weight files only when a shard needs them."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, RepoFile, constants, get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HFValidationError,
    HTTPError,  # of the HTTP library that this version of huggingface_hub uses
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import tqdm

from worker.errors import ModelError, first_line
from worker.model.checkpoint import (
    SMALL_FILES,
    Checkpoint,
    choose_weight_files,
    open_folder,
    read_config,
    stamp_of,
    weight_files,
)
from worker.model.headers import TensorInfo, read_tensors, tensors_of
from worker.platform.installation import read_record, write_record

_COMMIT = re.compile(r"[0-9a-f]{40}")
TIMEOUT_S = 10.0
_PARALLEL_FETCHES = 8


def open_repository(model: str) -> Checkpoint:
    """Open a hub repository, or its copy in the local cache: small files and the headers of its weights.

    Args:
        model: owner/name or owner/name@revision. The checkpoint's name ends in the commit.
    Raises:
        ModelError: it does not exist, is not readable or no safetensors model, or is neither reachable nor cached.
    """
    repository, _, revision = model.partition("@")
    with _explained(model):
        folder = _snapshot(repository, revision or None)
        config = read_config(folder)
        files = _weight_files(repository, folder)
        opened = stamp_of(folder, files)
        tensors = _tensors(repository, folder, files)
    hashes = _hashes(repository, folder.name, files)
    name, download = f"{repository}@{folder.name}", partial(_download, repository, folder)
    return Checkpoint(name, folder, config, tensors, download, hashes, opened=opened)


def open_cached(model: str, known: Mapping[str, TensorInfo]) -> Checkpoint:
    """Open a repository's copy in the local cache without any request to the hub.

    Args:
        known: the headers of another node's copy; they describe the tensors of missing files.
    Raises:
        ModelError: the cached copy is missing or damaged.
    """
    repository, _, revision = model.partition("@")
    with _explained(model):
        try:
            folder = Path(
                snapshot_download(
                    repository, revision=revision or None, allow_patterns=list(SMALL_FILES), local_files_only=True
                )
            )
        except LocalEntryNotFoundError as error:
            raise ModelError(
                f"{model} is not in its hub cache, and may not be downloaded; start it with --model {repository}, "
                "or set `pull: hub` in its own cluster.yaml"
            ) from error
        checkpoint = open_folder(folder, f"{repository}@{folder.name}", known)
    return replace(checkpoint, hub_hashes=_hashes(repository, folder.name, weight_files(folder)))


def _snapshot(repository: str, revision: str | None) -> Path:
    """Return the cached folder of a revision, named by its commit, after downloading all small files into it."""
    obstacle = _obstacle(repository, revision)
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(SMALL_FILES),
            local_files_only=obstacle is not None,
            tqdm_class=_counter(lambda nbytes: None),
        )
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{repository} is not in the cache {constants.HF_HUB_CACHE}, or not all of its small files are, and "
            f"{obstacle or 'the hub stopped answering'}; get it online once, or give a folder"
        ) from error
    return Path(folder)


def _obstacle(repository: str, revision: str | None) -> str | None:
    """Return why the hub cannot be used now; None if it can.

    Unlike this request, huggingface_hub's own first call has no timeout, and its listing tries six times.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if revision and _COMMIT.fullmatch(revision) and _listing(repository, revision):
        return None  # a commit never changes, and its listing is cached
    try:
        HfApi().model_info(repository, revision=revision, timeout=TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except (HTTPError, json.JSONDecodeError) as error:
        return f"{constants.ENDPOINT} does not answer ({first_line(error)})"
    return None


def _weight_files(repository: str, folder: Path) -> list[str]:
    """Return the names of all weight files, from the repository's listing: the folder may lack some of them."""
    listing = _listing(repository, folder.name)
    if listing is None or (folder / constants.SAFETENSORS_INDEX_FILE).exists():
        return weight_files(folder)
    if files := choose_weight_files(listing):
        return files
    raise ModelError(
        f"{repository} holds no *.safetensors, only {len(listing)} other files; "
        "choose a repository in safetensors format, or convert it with mlx_lm.convert"
    )


def _listing(repository: str, commit: str) -> dict[str, RepoFile] | None:
    """Return all files of the commit by name; None if its listing is not cached."""
    try:
        return {file.path: file for file in get_cached_repo_tree(repository, revision=commit)}
    except CachedRepoTreeNotFoundError:
        return None


def _hashes(repository: str, commit: str, files: list[str]) -> dict[str, str]:
    """Return the hub's own hashes of these files, as far as the cached listing has them."""
    listing = _listing(repository, commit) or {}
    known = [listing[file] for file in files if file in listing]
    return {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in known}


def _tensors(repository: str, folder: Path, files: list[str]) -> dict[str, TensorInfo]:
    """Return the files' tensors: from local files, else from stored headers, else from the hub."""
    keep = Path(constants.HF_HOME) / "brigade" / repository.replace("/", "--") / f"{folder.name}.msgpack"
    absent = [file for file in files if not (folder / file).exists()]
    found = read_record(keep)
    kept: dict[str, dict[str, Any]] = found if isinstance(found, dict) else {}
    if unknown := [file for file in absent if file not in kept]:
        with ThreadPoolExecutor(_PARALLEL_FETCHES) as pool:
            fetched = pool.map(partial(_fetch_header, repository, folder.name), unknown)
            kept |= zip(unknown, fetched, strict=True)
        write_record(keep, kept)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors |= tensors_of(file, kept[file]) if file in absent else read_tensors(folder, file)
    return tensors


def _fetch_header(repository: str, commit: str, file: str) -> dict[str, Any]:
    metadata = HfApi().parse_safetensors_file_metadata(repository, file, revision=commit, timeout=TIMEOUT_S)
    fields = ("dtype", "shape", "data_offsets")
    return {name: {field: getattr(info, field) for field in fields} for name, info in metadata.tensors.items()}


def _download(repository: str, folder: Path, files: Iterable[str], progress: Callable[[int], None]) -> None:
    """Download these weight files of the folder's commit; files that exist are only reported to `progress`."""
    with _explained(repository):
        for file in files:
            if (folder / file).exists():
                progress((folder / file).stat().st_size)
            else:
                hf_hub_download(repository, file, revision=folder.name, tqdm_class=_counter(progress))


def _counter(progress: Callable[[int], None]) -> type[tqdm]:
    """Return a progress bar class that draws nothing and reports the bytes that reached the disk."""

    class Counter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            progress(int(n or 0))

        def update_transfer(self, n: float | None = 1) -> None:
            """Ignore network traffic; without this method huggingface_hub makes a second bar for it."""

        def set_transfer_postfix_str(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing, like `update_transfer`."""

    return Counter


@contextmanager
def _explained(model: str) -> Iterator[None]:
    """Turn huggingface_hub's errors into ModelErrors that say what to do."""
    repository = model.partition("@")[0]
    try:
        yield
    except HFValidationError as error:
        raise ModelError(f"{model} is no folder here and no repository's name (owner/name); correct it") from error
    except GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{repository}"
        raise ModelError(f"{repository} is gated; accept its terms at {page}, then run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{repository} is no folder here and no repository that you may read at {constants.ENDPOINT}; "
            "correct the name, or run `hf auth login` if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{repository} has no such revision ({model}); give a branch, tag or commit") from error
    except SafetensorsParsingError as error:
        raise ModelError(f"{repository} holds a damaged safetensors file: {first_line(error)}") from error
    except (HTTPError, OSError, RuntimeError) as error:  # hf_xet raises a plain RuntimeError when a download fails
        raise ModelError(
            f"cannot get {model} from {constants.ENDPOINT}: {first_line(error.__cause__ or error)}; "
            "check network and disk, then start again"
        ) from error
