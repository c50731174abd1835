"""Several gateway processes behind one port: their sums, their tenants' shared rates, and who keeps them alive."""
