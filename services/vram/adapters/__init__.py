"""The outside world: the driver, the host's memory, the file of leases, the clock."""
