"""The gateway's description (OpenAPI 3.1)."""
