// Which sources the library was compiled from, as sources.py has it: the library says so when it is loaded.

extern "C" const char* jax_paged_sources() { return JAX_PAGED_SOURCES; }
