"""Decisions about leases, pure: the time, ids and readings of the driver are arguments."""
