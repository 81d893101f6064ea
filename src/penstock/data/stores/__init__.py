"""Files of this machine, objects in stores, and the copies of these here: no other room speaks to a
store.

It knows nothing of datasets. `Store` is a folder of a store (listing, ranged reads, writes, with
retries and renewed sessions); `find_remote`, `read_range` and `RemoteFile` read single URLs;
`Copies` and `UnitRecord` keep what came; `DaemonPool` has the threads that wait, and `watched` says
when a store is silent.
"""

from penstock.core.lazy_imports import public_names

__all__: list[str] = []

__dir__ = public_names(__name__)
