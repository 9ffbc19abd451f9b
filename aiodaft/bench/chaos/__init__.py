"""Random faults under random load: `python -m aiodaft.bench chaos --seed N --minutes M`."""
