"""Formats on disk: one spelling each, one way to refuse other versions; and names that are
deprecated.
"""

import warnings

import pytest

from penstock.core import deprecation, formats
from penstock.core.errors import FormatError, StateError
from penstock.core.formats import Format

FIELDS = Format("penstock thing", 3, reads=(2,))
NUMBER = Format("penstock thing", 3, reads=(2,), spelling="number")
TEXT = Format("penstock thing", 3, reads=(2,), spelling="text")


@pytest.mark.parametrize("one", [FIELDS, NUMBER, TEXT], ids=["fields", "number", "text"])
def test_versions_that_are_read_and_refused(one):
    assert one.check(one.fields(), "file", cure="make it again") == 3
    older = Format(one.name, 2, spelling=one.spelling)
    assert one.check(older.fields(), "file", cure="make it again") == 2
    newer = Format(one.name, 4, spelling=one.spelling)
    with pytest.raises(FormatError, match=r"version.*4.*2.*3.*upgrade.*penstock"):
        one.check(newer.fields(), "file", cure="make it again")
    oldest = Format(one.name, 1, spelling=one.spelling)
    with pytest.raises(StateError, match=r"version 1.*that wrote it.*again"):
        one.check(oldest.fields(), "file", cure="make it again", error=StateError)


@pytest.mark.parametrize("one", [FIELDS, NUMBER, TEXT], ids=["fields", "number", "text"])
@pytest.mark.parametrize("found", [None, True, "other 3", "penstock thing x", ["3"], {}])
def test_a_foreign_file_is_refused_with_what_was_found(one, found):
    with pytest.raises(FormatError, match=r"file: not a thing.*again") as refused:
        one.check({"format": found}, "file", cure="make it again")
    assert repr(found) in str(refused.value)


def test_what_is_on_disk_stays_as_it_was():
    assert formats.DATASET.fields() == {"format": "penstock dataset", "version": 1}
    assert formats.TEACHER_CACHE.fields() == {"format": "penstock teacher cache", "version": 1}
    assert formats.PROJECTION.fields() == {"format": "penstock projection 1"}
    assert formats.LOADER_STATE.fields() == {"format": 2}
    assert formats.CHECKPOINT.fields() == {"format": 2}
    for one in (formats.MODEL, formats.CONTINUED, formats.PLACE):
        assert one.fields() == {"format": 1}


def test_no_two_formats_share_a_name():
    names = [one.name for one in vars(formats).values() if isinstance(one, Format)]
    assert len(names) == len(set(names)) == 10


def test_a_deprecated_name_warns_once_at_the_line_that_uses_it():
    def old_name():
        deprecation.warn_deprecated("ps.old", use="ps.new", since="0.2", until="0.4")

    with pytest.warns(DeprecationWarning, match=r"ps\.old.*0\.2.*0\.4; use ps\.new") as found:
        old_name()
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        old_name()
