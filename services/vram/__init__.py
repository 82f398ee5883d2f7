"""How much memory a tenant may take: leases between processes that share a device."""
