"""The short cut inside uvicorn's HTTP protocol."""
