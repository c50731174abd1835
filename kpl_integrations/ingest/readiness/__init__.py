"""Readiness (`/readyz`): the parts of a gateway that can fail, their rules, and what watches them."""
