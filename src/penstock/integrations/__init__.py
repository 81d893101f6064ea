"""Working parts for other people's trainers: state, sharding and loss included, because shapes alone leak.

Each integration is a module of its own and needs its extra; importing this room needs none.
"""

from penstock.integrations.isolation import IsolationReport, check_isolation

__all__ = ["IsolationReport", "check_isolation"]
