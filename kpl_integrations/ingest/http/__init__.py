"""HTTP: request heads and bodies, answers and problems, bounds of connections, listening sockets."""
