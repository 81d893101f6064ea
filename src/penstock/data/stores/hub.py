"""Datasets on the Hugging Face Hub: how URLs name them, how their repositories are made,
and how a file is looked up."""

import re
from typing import Any

from penstock.core.errors import StoreError
from penstock.core.json_values import JsonObject
from penstock.core.urls import plain_cause, without_secrets

CARD = "README.md"
"""The page of a repository, its dataset card."""
_REPOSITORY = re.compile(
    r"hf://datasets/([^/@*?[]+/[^/@*?[]+)(?:@(?:refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/|$)"
)


def is_whole(url: str) -> bool:
    """Whether a URL names a whole dataset, at a revision or not, and no file or folder in it."""
    return _REPOSITORY.fullmatch(url) is not None


def name_in(url: str) -> str:
    """The path of a file in its dataset, by its URL."""
    found = _REPOSITORY.match(url)
    return url[found.end() :] if found else url


def repository_in(url: str) -> str:
    """OWNER/NAME of the dataset of a URL, without its revision; empty: it is not on the Hub."""
    found = _REPOSITORY.match(url)
    return found[1] if found else ""


def make_repository(url: str) -> None:
    """Make the repository that a URL names, private, unless it is there; others decide who sees it.

    Raises:
        StoreError: It cannot be made.
    """
    name = repository_in(url)
    if not name:
        return
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        if not hub.repo_exists(name, repo_type="dataset"):
            hub.create_repo(name, repo_type="dataset", private=True, exist_ok=True)
    except Exception as error:  # the package has an error tree of its own
        said = " ".join(without_secrets(str(error), url).split())
        raise StoreError(
            f"hf://datasets/{name}: cannot be made: {type(error).__name__}: {said}; "
            "log in with a token that may write (`hf auth login`, or HF_TOKEN), or make it on the "
            "site"
        ) from plain_cause(error, url)


def look_up(files: Any, path: str) -> JsonObject:
    """A file or folder, asked of the Hub itself.

    `HfFileSystem.info` answers from a listing of the whole folder, which another thread may have
    begun before this one wrote the file.

    Raises:
        FileNotFoundError: There is none.
    """
    from huggingface_hub.hf_api import HfApi, RepoFile

    place = files.resolve_path(path)
    repository, inside = getattr(place, "repo_id", None), getattr(place, "path_in_repo", "")
    if not repository or not inside:  # a bucket, or a repository itself
        entry: JsonObject = files.info(path)
        return entry
    found = HfApi(endpoint=files.endpoint, token=files.token).get_paths_info(
        repository, [inside], revision=place.revision, repo_type=place.repo_type
    )
    if not found:
        raise FileNotFoundError(path)
    if not isinstance(found[0], RepoFile):
        return {"type": "directory"}
    return {"type": "file", "size": found[0].size, "blob_id": found[0].blob_id}
