"""The server under storms, crowds and clients that misbehave: `make bench-server`."""
