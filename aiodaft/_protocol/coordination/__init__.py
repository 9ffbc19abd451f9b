"""The coordinator's tables: names, members, leases. They decide on changes, which take effect once they are stored."""
