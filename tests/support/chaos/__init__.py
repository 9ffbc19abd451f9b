"""Random faults under random load: `python tests/support/chaos --seed N --minutes M`."""
