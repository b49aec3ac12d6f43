"""Serves a model with the OpenAI API, as the command `jax-paged` does; see `python serve.py --help`."""

from jax_paged.server.launch.cli import main

if __name__ == "__main__":
    main()
