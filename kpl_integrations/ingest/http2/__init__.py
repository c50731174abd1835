"""HTTP/2: connections, their requests, and bounds on frames."""
