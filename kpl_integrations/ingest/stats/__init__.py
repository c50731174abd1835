"""What the gateway counts and shows."""
