"""Working parts for other people's trainers: state, sharding and loss included, because shapes alone leak.

Each integration is a module of its own and needs its extra; nothing is imported here.
"""
