"""What can be set, checked once: configuration, policies, service limits."""
