"""Starts the OpenAI-compatible server, like the command `jax-paged`; see `python serve.py --help`."""

from jax_paged.server.launch.cli import main

if __name__ == "__main__":
    main()
