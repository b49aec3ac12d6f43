"""Serves a model with the OpenAI API; see `python serve.py --help`."""

from jax_paged.server.app import main

if __name__ == "__main__":
    main()
