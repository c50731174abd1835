"""Several gateway processes behind one port: supervision, their summed statistics, and tenants' shared rates."""
