"""A name that the Hub has not, in a loader and as sources."""

import os

from makers.processes import run_code
from makers.web_server import serving


def test_a_name_that_the_hub_has_not_is_one_sentence():
    """The Hub answers 401 for what is not there, which is no refusal of credentials, and no reason
    to ask five times.
    """
    asked, online = [], {"HF_HUB_OFFLINE": "0"}

    def answer(handler):
        asked.append(handler.path)
        return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"}, b""

    with serving(answer) as url:
        done = run_code(
            """
            import penstock as ps
            from penstock.data.sources import open_sources
            for use in (
                lambda: ps.Loader("hf://datasets/no/none", sequence_length=16, rows_per_step=2),
                lambda: open_sources("hf://datasets/no/none"),
            ):
                try:
                    use()
                except ps.PenstockError as error:
                    print(error)
            """,
            env={**os.environ, "HF_ENDPOINT": url, "NO_PROXY": "127.0.0.1", **online},
        )
    said = done.stdout.splitlines()
    assert len(said) == 2, (done.stdout, done.stderr)
    for line in said:
        assert "the hub has nothing by that name, or it is private" in line
        assert "Request ID" not in line
        assert "Error" not in line
    assert len(asked) <= 8
