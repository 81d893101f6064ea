"""A tokenizer, and a server that several tests share."""

import pytest
from serving_makers import make_model, make_tokenizer, running

pytest.importorskip("fastapi")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def server(tokenizer):
    with running(make_model(tokenizer)) as server:
        yield server
