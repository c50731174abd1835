"""The fast path inside uvicorn's HTTP protocol. `KPL_INGEST_FAST_PATH=false` turns it off."""
